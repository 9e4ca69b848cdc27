"""Notes that lead from one store to another, whatever moves, restarts and stale notes there are."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from rallypoint.rendezvous import notes
from rallypoint.rendezvous.notes import Age, Moved


NOTE = Moved("h1", 1, Age(3, 1, "s"))


@pytest.mark.parametrize(
    ("here", "followed"),
    [
        (Age(), True),
        (Age(3, 0, "z"), True),  # where the job was before it moved
        (Age(2, 9, "z"), True),  # a part that was cut off: it moved often but made no progress
        (Age(3, 1, "a"), True),  # two parts that moved at the same time: all choose the same one
        (Age(3, 1, "s"), False),
        (Age(3, 1, "z"), False),
        (Age(3, 2, "a"), False),
        (Age(4, 0, "a"), False),
    ],
)
def test_a_note_leads_to_a_newer_store_only(here: Age, followed: bool) -> None:
    assert notes.leads_on(notes.written(NOTE), here) == (NOTE if followed else None)
    assert notes.leads_on(notes.written(NOTE), here, frozenset({"s"})) is None


@pytest.mark.parametrize(
    "note", [None, 7, {}, {"addr": "x"}, {"addr": 7, "port": 1}, {"addr": "x", "port": 65536}]
)
def test_what_is_no_note_leads_nowhere(note: object) -> None:
    assert notes.leads_on(note, Age()) is None
    assert notes.is_news(NOTE, note)


def test_an_older_note_does_not_take_the_place_of_a_newer_one() -> None:
    newer = replace(NOTE, age=Age(4, 0, "a"))
    assert notes.is_news(newer, notes.written(NOTE))
    assert not notes.is_news(NOTE, notes.written(newer))
    assert not notes.is_news(NOTE, notes.written(NOTE))


def test_a_store_without_a_name_is_led_to_by_nobody() -> None:
    assert notes.to_lead_to(Age(3, 1), Age(2, 1, "a")) is None
    assert notes.to_lead_to(Age(3, 1, "a"), Age(2, 1)) == Age(3, 1, "a")
    assert notes.to_lead_to(Age(3, 1, "a"), Age(2, 1, "a")) is None


# -- arbitrary histories --------------------------------------------------------------------------


@dataclass
class Served:
    """One store at one place."""

    age: Age
    note: dict[str, object] | None = None


@dataclass
class World:
    """Places, at most one store at each, and nodes that are connected to them."""

    places: dict[int, Served] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)  # where each node is
    ended: list[set[str]] = field(default_factory=list)  # stores that each knows to be gone
    written: list[Moved] = field(default_factory=list)
    names: itertools.count[int] = field(default_factory=itertools.count)

    def serve(self, place: int, generation: int, moves: int) -> None:
        self.places[place] = Served(Age(generation, moves, f"s{next(self.names)}"))

    def leave_note(self, one: int, other: int) -> None:
        """What the node that serves ``one`` does when it finds ``other``."""
        ages = {each: self.places[each].age for each in (one, other)}
        newer = notes.to_lead_to(ages[one], ages[other])
        if newer is None:
            return
        right, wrong = (one, other) if newer == ages[one] else (other, one)
        note = Moved(f"h{right}", 1, newer)
        self.written.append(note)
        self.put(note, wrong)

    def put(self, note: Moved, place: int) -> None:
        if notes.is_news(note, self.places[place].note):
            self.places[place].note = notes.written(note)

    def follow(self, node: int) -> bool:
        """One step of a node; returns whether it could take one."""
        here = self.places.get(self.nodes[node])
        if here is None:
            return False
        moved = notes.leads_on(here.note, here.age, frozenset(self.ended[node]))
        if moved is None:
            return False
        place = int(moved.addr[1:])
        found = self.places.get(place)
        if found is None or found.age.store != moved.age.store:
            self.ended[node].add(moved.age.store)
            if here.note == notes.written(moved):
                here.note = {}
            return True
        assert found.age > here.age, "whoever follows a note comes to a newer store"
        self.nodes[node] = place
        return True


ACTS = ("round", "move", "leave", "restart", "end", "note", "stale", "follow")


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.data())
def test_all_come_to_the_newest_store_and_nobody_goes_in_circles(data: st.DataObject) -> None:
    world = World()
    count = data.draw(st.integers(2, 4), label="places")
    world.serve(0, 0, 0)
    world.nodes = [0] * data.draw(st.integers(1, 4), label="nodes")
    world.ended = [set() for _ in world.nodes]
    for act in data.draw(st.lists(st.sampled_from(ACTS), max_size=25), label="acts"):
        place, other = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
        node = data.draw(st.integers(0, len(world.nodes) - 1))
        served, at = world.places.get(place), world.places.get(world.nodes[node])
        match act:
            case "round" if served is not None:
                served.age = replace(served.age, generation=served.age.generation + 1)
            case "move" | "leave" if at is not None and served is None:
                # Its nodes meet at another place; the old store is lost or stays for a while.
                world.serve(place, at.age.generation, at.age.moves + 1)
                if act == "move":
                    del world.places[world.nodes[node]]
                world.nodes[node] = place
            case "restart":
                world.serve(place, 0, 0)
                world.nodes[node] = place
            case "end" if len(world.places) > 1:
                world.places.pop(place, None)
            case "note" if served is not None and other in world.places:
                world.leave_note(place, other)
            case "stale" if served is not None and world.written:
                # The writer of a note writes it again, late and perhaps elsewhere.
                world.put(data.draw(st.sampled_from(world.written)), place)
            case "follow":
                world.follow(node)
    # Nodes that have lost their store find any other; nodes that serve find each other.
    for node, place in enumerate(world.nodes):
        if place not in world.places:
            world.nodes[node] = data.draw(st.sampled_from(sorted(world.places)))
    newest = max(world.places, key=lambda place: world.places[place].age)
    for _ in range(60):
        for one, other in itertools.permutations(world.places, 2):
            world.leave_note(one, other)
        steps = [world.follow(node) for node in range(len(world.nodes))]
        if not any(steps):
            break
    assert set(world.nodes) == {newest}
