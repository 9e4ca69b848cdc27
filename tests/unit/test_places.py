"""Where nodes go when their store is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, strategies as st

from rallypoint.rendezvous.backends.places import Answer, Place, Search


OLD = Place("a", 1)
HOST, STANDBYS = "n0", [Place(f"h{i}", 1, f"n{i}", 2) for i in range(1, 5)]
ALIVE, SILENT = 6.0, 2.0


def search(own: int, dead: tuple[str, ...] = ()) -> Search:
    """The search of node ``own``; 1 to 4 are standbys, others are not."""
    return Search(
        OLD,
        HOST,
        STANDBYS,
        own=f"n{own}",
        dead=dead,
        alive_patience=ALIVE,
        silent_patience=SILENT,
    )


def answers(old: Answer, *others: Answer | None) -> dict[Place, Answer]:
    held = dict(zip(STANDBYS, others, strict=False))
    return {OLD: old, **{place: answer for place, answer in held.items() if answer is not None}}


def test_the_old_place_comes_first_if_it_still_serves() -> None:
    for own in (1, 2, 9):
        assert search(own).choose(0.0, answers(Answer.SERVES, Answer.SERVES)) == OLD


def test_the_first_standby_serves_as_soon_as_the_old_place_does_not() -> None:
    first = search(1)
    assert first.choose(0.0, {}) is None  # the old place may be about to answer
    assert first.choose(0.5, answers(Answer.SILENT)) == STANDBYS[0]
    assert first.dead == set()
    assert search(1).choose(0.0, answers(Answer.DEAD)) == STANDBYS[0]


def test_who_comes_later_waits_for_those_before_it_that_live() -> None:
    third = search(3)
    held = answers(Answer.DEAD, Answer.DEAD, Answer.ALIVE)
    assert third.choose(0.0, held) is None
    assert third.choose(ALIVE - 0.1, held) is None
    assert third.choose(ALIVE + 0.1, held) == STANDBYS[2]
    assert third.dead == {HOST, "n1"}


def test_one_is_waited_for_after_the_other() -> None:
    fourth = search(4)
    held = answers(Answer.DEAD, Answer.ALIVE, Answer.SILENT, Answer.DEAD)
    assert fourth.choose(0.0, held) is None
    assert fourth.choose(ALIVE - 0.1, held) is None
    assert fourth.choose(ALIVE + SILENT - 0.2, held) is None  # the second's turn is not over
    assert fourth.choose(ALIVE + SILENT + 0.1, held) == STANDBYS[3]


def test_a_silent_place_keeps_nobody_from_one_that_serves() -> None:
    second = search(2)
    assert second.choose(0.0, {STANDBYS[0]: Answer.SERVES}) == STANDBYS[0]
    assert second.choose(0.0, {STANDBYS[2]: Answer.SERVES}) == STANDBYS[2]


def test_a_node_that_cannot_serve_waits_for_others() -> None:
    first = search(1)
    held = answers(Answer.DEAD)
    assert first.choose(0.0, held) == STANDBYS[0]
    held[STANDBYS[0]] = Answer.SILENT
    first.note_unable(STANDBYS[0])  # another process has its port
    assert first.choose(0.0, held) is None
    held[STANDBYS[1]] = Answer.SERVES
    assert first.choose(1.0, held) == STANDBYS[1]


def test_who_is_known_to_be_dead_is_not_asked() -> None:
    second = search(2, dead=(HOST, "n1"))
    assert second.to_ask() == (STANDBYS[2], STANDBYS[3])
    assert second.choose(0.0, {}) == STANDBYS[1]


def test_a_node_that_is_no_standby_only_looks() -> None:
    other = search(9)
    assert other.choose(1000.0, answers(*[Answer.DEAD] * 5)) is None


ENDPOINT = Place("first", 1)


def waiting() -> Search:
    """The search of a node that is no standby: it looks at the endpoint as well."""
    return Search(
        OLD,
        HOST,
        [*STANDBYS, ENDPOINT],
        own="new",
        dead=(),
        alive_patience=ALIVE,
        silent_patience=SILENT,
    )


def test_the_endpoint_comes_after_every_standby_that_may_still_serve() -> None:
    node = waiting()
    held = {**answers(Answer.DEAD, Answer.DEAD, Answer.ALIVE), ENDPOINT: Answer.SERVES}
    assert node.choose(0.0, held) is None
    held |= answers(Answer.DEAD, *[Answer.DEAD] * 4)
    assert node.choose(0.5, held) == ENDPOINT
    assert node.dead == {HOST, "n1", "n2", "n3", "n4"}


def test_one_that_waits_starts_over_only_where_all_are_seen_to_have_ended() -> None:
    node = waiting()
    ended = answers(*[Answer.DEAD] * 5)
    assert node.nobody_is_left(ended)
    for place in (OLD, *STANDBYS):
        for answer in (Answer.SILENT, Answer.ALIVE, Answer.SERVES):
            assert not node.nobody_is_left({**ended, place: answer})
        assert not node.nobody_is_left({p: a for p, a in ended.items() if p != place})
    assert not search(2).nobody_is_left(ended), "it serves itself"


@dataclass
class World:
    """Nodes that search at the same time; some are dead or silent, the others act in a random order."""

    dead: frozenset[int]
    silent: frozenset[int]
    now: float = 0.0
    serving: set[int] = field(default_factory=set)

    def answers(self, asker: int) -> dict[Place, Answer]:
        held = {OLD: Answer.SILENT if 0 in self.silent else Answer.DEAD}
        for index, place in enumerate(STANDBYS, 1):
            if index == asker:
                continue
            if index in self.serving:
                held[place] = Answer.SERVES
            elif index in self.silent:
                held[place] = Answer.SILENT
            else:
                held[place] = Answer.DEAD if index in self.dead else Answer.ALIVE
        return held


@given(
    st.frozensets(st.integers(1, 4), max_size=3),
    st.frozensets(st.integers(0, 4), max_size=3),
    st.data(),
)
def test_all_that_live_come_to_one_place(
    dead: frozenset[int], silent: frozenset[int], data: st.DataObject
) -> None:
    world = World(dead, silent - dead)
    living = [index for index in range(1, 7) if index not in dead | silent]
    standbys = [index for index in living if index <= 4]
    searches = {index: search(index) for index in living}
    gone_to: dict[int, Place] = {}
    while len(gone_to) < len(living) and world.now < 60.0:
        world.now += 0.25
        for index in data.draw(st.permutations(living)) if world.now < 1.0 else living:
            if index in gone_to:
                continue
            place = searches[index].choose(world.now, world.answers(index))
            if place is not None:
                gone_to[index] = place
                if place.node_id == f"n{index}":
                    world.serving.add(index)
    if standbys:
        assert {place.node_id for place in gone_to.values()} == {f"n{standbys[0]}"}
        assert len(gone_to) == len(living)
    else:
        assert not gone_to
