"""The rendezvous protocol under arbitrary interleavings, delays and deaths: nothing here does I/O.

Each node is its generator of steps; a scheduler drawn by hypothesis decides whose operation takes
effect next, who dies, and when time passes. Operations act on one shared table, as a linearizable store's do.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from rallypoint.rendezvous import protocol
from rallypoint.rendezvous.protocol import Closed, Joined, Node, TimedOut, Timing
from rallypoint.rendezvous.quorum import Settings


TIMING = Timing(join=600.0, lease=5.0)
BEAT = 0.5


@dataclass
class Participant:
    """A node: its generator, the operation it is about to do, and what came of it."""

    node: Node
    settings: Settings
    steps: Any = None
    operation: Any = None
    blocked_until: float | None = None
    outcome: Any = None
    alive: bool = True
    reasons: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.node.node_id


class World:
    """One store, one clock, and nodes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.table: dict[str, Any] = {}
        self.nodes: dict[str, Participant] = {}
        self.plans: dict[int, Any] = {}
        self.operations = 0

    def add(self, name: str, settings: Settings, **more: Any) -> Participant:
        node = Node(node_id=name, host=more.pop("host", name), **more)
        self.nodes[name] = participant = Participant(node, settings)
        self.start(participant)
        return participant

    def start(self, participant: Participant) -> None:
        participant.outcome = None
        participant.steps = protocol.next_round(participant.node, participant.settings, TIMING)
        participant.blocked_until = None
        participant.operation = next(participant.steps)

    def again(self, participant: Participant) -> None:
        """Into the next round, as a member of the one it has joined."""
        joined = participant.outcome
        assert isinstance(joined, Joined)
        participant.node = replace(
            participant.node,
            generation=joined.generation,
            rank=joined.rank,
            slot=joined.slot,
            num_nodes=len(joined.plan["order"]),
        )
        self.start(participant)

    def runnable(self) -> list[Participant]:
        return [
            each
            for each in self.nodes.values()
            if each.alive and each.outcome is None and self._can_act(each)
        ]

    def _can_act(self, participant: Participant) -> bool:
        operation = participant.operation
        if isinstance(operation, protocol.Await) and operation.key not in self.table:
            if participant.blocked_until is None:
                participant.blocked_until = self.now + operation.timeout
            return self.now >= participant.blocked_until
        return True

    def act(self, participant: Participant) -> None:
        """The participant's operation takes effect, and it goes on to its next."""
        self.operations += 1
        result = self._apply(participant, participant.operation)
        participant.blocked_until = None
        try:
            participant.operation = participant.steps.send((self.now, result))
        except StopIteration as stop:
            participant.outcome = stop.value
            self._check(participant)

    def _apply(self, participant: Participant, operation: Any) -> Any:
        table = self.table
        match operation:
            case protocol.Claim(key, body):
                return table.setdefault(key, body)
            case protocol.Increment(key):
                table[key] = table.get(key, 0) + 1
                return table[key]
            case protocol.Write(key, body):
                table[key] = body
            case protocol.Await(key):
                return table.get(key)
            case protocol.Look(keys):
                return [table.get(key) for key in keys]
            case protocol.Count(key):
                return table.get(key, 0)
            case protocol.Delete(key):
                table.pop(key, None)
            case protocol.Gone():
                return frozenset()
            case protocol.Tell(text):
                participant.reasons.append(text)
        return None

    def _check(self, participant: Participant) -> None:
        outcome = participant.outcome
        if isinstance(outcome, Joined):
            held = self.plans.setdefault(outcome.generation, outcome.plan)
            assert held == outcome.plan, "two plans in one generation"
            order = outcome.plan["order"]
            assert len(set(order)) == len(order)
            assert not set(order) & set(outcome.plan["spares"])

    def pass_time(self) -> None:
        """Until something can happen that could not: live nodes beat meanwhile."""
        waits = [
            each.blocked_until
            for each in self.nodes.values()
            if each.alive and each.outcome is None and each.blocked_until is not None
        ]
        until = max(self.now, min(waits, default=self.now))
        self.now = min(until, self.now + BEAT) if until > self.now else until
        for each in self.nodes.values():
            if each.alive:
                number = self.table.get(f"beat/{each.name}", {"beat": 0})["beat"]
                self.table[f"beat/{each.name}"] = {"beat": number + 1}

    def run(self, limit: float = 2000.0) -> None:
        """Fairly, until nobody has anything to do."""
        end = self.now + limit
        while any(each.alive and each.outcome is None for each in self.nodes.values()):
            runnable = self.runnable()
            if runnable:
                for each in runnable:
                    self.act(each)
            else:
                if self.now >= end:
                    return
                self.pass_time()


def ranks_of(world: World, generation: int) -> dict[str, int]:
    return {
        each.name: each.outcome.rank
        for each in world.nodes.values()
        if isinstance(each.outcome, Joined) and each.outcome.generation == generation
    }


FIXED4 = Settings(min_nodes=4, max_nodes=4)
ELASTIC = Settings(min_nodes=2, max_nodes=4, last_call=3.0)


def test_a_round_of_fixed_size_forms_as_soon_as_all_are_there() -> None:
    world = World()
    for name in ("node10", "node2", "node1", "node3"):
        world.add(name, FIXED4)
    world.run()
    assert ranks_of(world, 0) == {"node1": 0, "node2": 1, "node3": 2, "node10": 3}
    assert world.now < 101


def test_a_constant_number_of_operations_for_each_node() -> None:
    costs = []
    for n in (8, 64):
        world = World()
        for index in range(n):
            world.add(f"n{index}", Settings(min_nodes=n, max_nodes=n))
        world.run()
        costs.append(world.operations / n)
    assert costs[1] <= costs[0] <= 9


def test_fewer_than_max_form_a_round_when_the_last_call_is_over() -> None:
    world = World()
    for name in "abc":
        world.add(name, ELASTIC)
    world.run()
    assert len(ranks_of(world, 0)) == 3
    assert 103 <= world.now <= 105


def test_a_survivor_keeps_its_rank_and_the_dead_one_is_not_waited_for_beyond_the_lease() -> None:
    world = World()
    for name in "abcd":
        world.add(name, ELASTIC)
    world.run()
    world.nodes["b"].alive = False
    before = world.now
    for name in "acd":
        world.again(world.nodes[name])
    world.run()
    assert ranks_of(world, 1) == {"a": 0, "c": 2, "d": 1}
    assert world.now - before <= TIMING.lease + 2


def test_a_replacement_takes_the_dead_nodes_rank() -> None:
    world = World()
    for name in "abcd":
        world.add(name, FIXED4)
    world.run()
    world.nodes["b"].alive = False
    for name in "acd":
        world.again(world.nodes[name])
    world.add("z", FIXED4)
    world.run()
    assert ranks_of(world, 1) == {"a": 0, "c": 2, "d": 3, "z": 1}


def test_too_many_nodes_are_spares_and_step_in() -> None:
    world = World()
    for name in "abcdef":
        world.add(name, FIXED4)
    world.run(60)
    members = ranks_of(world, 0)
    assert len(members) == 4
    assert world.table["1/waiting"] == 2
    victim = min(members)
    world.nodes[victim].alive = False
    for name in members.keys() - {victim}:
        world.again(world.nodes[name])
    world.run(60)
    after = ranks_of(world, 1)
    assert len(after) == 4
    assert {after[n] for n in members.keys() - {victim}} == {
        members[n] for n in members.keys() - {victim}
    }


def test_a_late_node_waits_for_the_next_round_and_is_admitted() -> None:
    world = World()
    for name in "ab":
        world.add(name, ELASTIC)
    world.run()
    world.add("late", ELASTIC)
    world.run(60)
    assert world.nodes["late"].outcome is None
    assert world.table["1/waiting"] == 1
    before = world.now
    for name in "ab":
        world.again(world.nodes[name])
    world.run()
    assert ranks_of(world, 1) == {"a": 0, "b": 1, "late": 2}
    assert world.now - before < 1


def test_waiting_nodes_open_a_round_when_all_members_are_dead() -> None:
    world = World()
    for name in "ab":
        world.add(name, ELASTIC)
    world.run()
    for name in "xy":
        world.add(name, ELASTIC)
    world.run(60)
    for name in "ab":
        world.nodes[name].alive = False
    world.run()
    assert ranks_of(world, 1).keys() == {"x", "y"}


def test_who_is_missing_is_told_when_time_is_over() -> None:
    world = World()
    for name in "abc":
        world.add(name, FIXED4)
    world.run(3000)
    for name in "abc":
        outcome = world.nodes[name].outcome
        assert isinstance(outcome, TimedOut)
    leader = next(n.outcome for n in world.nodes.values() if n.outcome.reason != "no plan was made")
    assert sorted(leader.arrived) == ["a", "b", "c"]
    assert leader.reason == "3 of 4 nodes are here"
    assert any("3 of 4" in text for node in world.nodes.values() for text in node.reasons)


def test_a_closed_rendezvous_ends_the_wait_of_all() -> None:
    world = World()
    for name in "abc":
        world.add(name, FIXED4)
    world.run(1)
    world.table["closed"] = {"closed": "the job has ended"}
    world.run(60)
    assert all(isinstance(each.outcome, Closed) for each in world.nodes.values())


def test_nodes_of_one_label_get_neighbouring_ranks() -> None:
    world = World()
    by_label = replace(FIXED4, by_label=True)
    for name, label in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")):
        world.add(name, by_label, label=label)
    world.run()
    assert ranks_of(world, 0) == {"a": 0, "c": 1, "b": 2, "d": 3}


@pytest.mark.parametrize("step", range(12))
def test_the_leaders_death_at_every_step_only_elects_another(step: int) -> None:
    world = World()
    settings = Settings(min_nodes=3, max_nodes=3)
    for name in "abcd":
        world.add(name, settings)
    leader = world.nodes["a"]
    for _ in range(step):
        if leader.outcome is None and leader in world.runnable():
            world.act(leader)
        else:
            for each in world.runnable():
                world.act(each)
    leader.alive = False
    world.run(100)
    living = [world.nodes[name] for name in "bcd"]
    if any(isinstance(each.outcome, Joined) for each in living):
        # The plan was out before it died: its members find that out, and meet again.
        joined = [each for each in living if isinstance(each.outcome, Joined)]
        if len(joined) < 3:
            for each in joined:
                world.again(each)
            world.run(100)
    generations = {each.outcome.generation for each in living if isinstance(each.outcome, Joined)}
    assert len(generations) == 1
    assert len(ranks_of(world, generations.pop()).keys() & set("bcd")) == 3


def test_two_halves_of_a_split_network_do_not_both_go_on() -> None:
    world = World()
    world.add("a", ELASTIC, generation=4, rank=0, num_nodes=4, survivors_needed=3)
    world.add("b", ELASTIC, generation=4, rank=1, num_nodes=4, survivors_needed=3)
    world.table["4/plan"] = {"by": "a", "order": [0, 1, 2, 3], "first": {"id": "a"}}
    world.table["4/ids/a"] = {"ids": list("abcd")}
    world.run(60)
    assert all(world.nodes[name].outcome is None for name in "ab")
    world.add("c", ELASTIC, generation=4, rank=2, num_nodes=4, survivors_needed=3)
    world.run(60)
    assert len(ranks_of(world, 5)) == 3


# -- arbitrary schedules --------------------------------------------------------------------------


@hypothesis_settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_interleaving_with_deaths_ends_in_one_plan_of_all_that_live(
    data: st.DataObject,
) -> None:
    least = data.draw(st.integers(1, 4), label="min")
    most = data.draw(st.integers(least, 6), label="max")
    settings = Settings(min_nodes=least, max_nodes=most, last_call=2.0)
    world = World()
    count = data.draw(st.integers(1, 7), label="nodes")
    for index in range(count):
        world.add(f"n{index}", settings)
    # Chaos: any order, deaths, time that passes while operations are on their way.
    for _ in range(data.draw(st.integers(0, 60), label="steps")):
        runnable = world.runnable()
        action = data.draw(st.integers(0, 20), label="action")
        if action == 0 and sum(n.alive for n in world.nodes.values()) > least:
            victim = data.draw(st.sampled_from(sorted(world.nodes)), label="victim")
            world.nodes[victim].alive = False
        elif action == 1 or not runnable:
            world.pass_time()
        elif action == 2:
            joined = [n for n in world.nodes.values() if n.alive and isinstance(n.outcome, Joined)]
            if joined:  # its workers failed: it goes on to the next round
                world.again(joined[0])
        else:
            world.act(data.draw(st.sampled_from(runnable), label="who"))
    # Quiet: nobody dies any more. Members go on until their round has no dead, and all agree.
    for _ in range(10):
        world.run(200)
        alive = [each for each in world.nodes.values() if each.alive]
        joined = [each for each in alive if isinstance(each.outcome, Joined)]
        newest = max((each.outcome.generation for each in joined), default=-1)
        behind = [each for each in joined if each.outcome.generation < newest]
        members = (
            world.table.get(f"{newest}/ids/{world.plans[newest]['by']}", {"ids": []})["ids"]
            if newest >= 0
            else []
        )
        dead = [name for name in members if not world.nodes[name].alive]
        waiting = [each for each in alive if each.outcome is None]
        short = newest >= 0 and len(members) < min(most, len(alive))
        if not behind and not dead and not (short and waiting):
            break
        for each in joined if (dead or short) else behind:
            world.again(each)
    alive = [each for each in world.nodes.values() if each.alive]
    if len(alive) < least:
        return
    joined = [each for each in alive if isinstance(each.outcome, Joined)]
    assert len(joined) == min(most, len(alive)), [(n.name, n.outcome) for n in alive]
    assert len({each.outcome.generation for each in joined}) == 1
    assert sorted(each.outcome.rank for each in joined) == list(range(len(joined)))
    with contextlib.suppress(KeyError):
        assert world.plans[joined[0].outcome.generation]["order"]
