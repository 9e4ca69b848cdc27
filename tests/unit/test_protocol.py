"""The rendezvous protocol under arbitrary interleavings, delays and deaths, without any I/O.

Each node is its generator of steps. A scheduler drawn by hypothesis decides whose operation takes effect next,
who dies, whose answer is lost, when the store is lost, and when time passes. Operations act on one shared table,
as a linearizable store's do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from rallypoint.rendezvous import notes, operations, plan as plans, protocol
from rallypoint.rendezvous.notes import Age, Moved
from rallypoint.rendezvous.protocol import Closed, Joined, Node, TimedOut, Timing
from rallypoint.rendezvous.quorum import Settings


TIMING = Timing(join=600.0, lease=5.0)
BEAT = 0.5


@dataclass
class Participant:
    """A node: its generator, its next operation, and the outcome."""

    node: Node
    settings: Settings
    steps: Any = None
    operation: Any = None
    blocked_until: float | None = None
    outcome: Any = None
    alive: bool = True
    beats: bool = False
    epoch: int = 0  # of the store it is connected to
    needed: int = 0  # survivors that it must not go on without
    is_new: bool = False  # the store has replaced a lost one
    plan: Any = None  # of the round it is a member of
    ids: tuple[str, ...] = ()
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
        self.plans: dict[tuple[int, int], Any] = {}
        self.places: dict[tuple[int, int, int], str] = {}
        self.epoch = 0
        self.operations = 0

    def add(self, name: str, settings: Settings, **more: Any) -> Participant:
        needed, is_new = more.pop("needed", 0), more.pop("is_new", False)
        node = Node(node_id=name, host=more.pop("host", name), **more)
        self.nodes[name] = participant = Participant(
            node, settings, epoch=self.epoch, needed=needed, is_new=is_new
        )
        self.start(participant)
        return participant

    def start(self, participant: Participant) -> None:
        participant.outcome = None
        participant.steps = protocol.next_round(participant.node, participant.settings, TIMING)
        participant.blocked_until = None
        participant.operation = next(participant.steps)

    def again(self, participant: Participant) -> None:
        """Enter the next round, as a member of the one that it has joined."""
        joined = participant.outcome
        assert isinstance(joined, Joined)
        participant.node = replace(
            participant.node,
            generation=joined.generation,
            rank=joined.rank,
            slot=joined.slot,
            num_nodes=len(joined.plan["order"]),
        )
        self.recover(participant)
        self.start(participant)

    def retry(self, participant: Participant, *, took_effect: bool) -> None:
        """Its connection breaks in the middle of an operation, so it starts the round again."""
        if took_effect and not isinstance(participant.operation, operations.Await):
            self._apply(participant, participant.operation)
        self.start(participant)

    def lose_store(self) -> None:
        """An empty store replaces it; nodes in a round or on their way to one find out later."""
        self.epoch += 1
        self.table = {}

    def recover(self, participant: Participant) -> None:
        """What the shell does at an empty store, for a member of a round."""
        if participant.epoch == self.epoch:
            return
        participant.epoch = self.epoch
        generation = participant.node.generation
        if generation is None:
            return
        plan = plans.seeded(participant.plan)
        if participant.ids:
            self.table[plans.ids_key(generation, plan)] = {"ids": list(participant.ids)}
        self.table.setdefault(f"{generation}/plan", plan)
        if self.table.get("head", {"generation": 0})["generation"] <= generation:
            self.table["head"] = {"generation": generation + 1}

    def runnable(self) -> list[Participant]:
        return [
            each
            for each in self.nodes.values()
            if each.alive and each.outcome is None and self._can_act(each)
        ]

    def _can_act(self, participant: Participant) -> bool:
        if participant.epoch != self.epoch:
            return True
        operation = participant.operation
        if isinstance(operation, operations.Await) and operation.key not in self.table:
            if participant.blocked_until is None:
                participant.blocked_until = self.now + operation.timeout
            return self.now >= participant.blocked_until
        return True

    def act(self, participant: Participant) -> None:
        """The participant's operation takes effect, and the participant proceeds to its next one."""
        if participant.epoch != self.epoch:
            self.recover(participant)
            self.start(participant)
            return
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
            case operations.Claim(key, body):
                return table.setdefault(key, body)
            case operations.Increment(key):
                table[key] = table.get(key, 0) + 1
                return table[key]
            case operations.Write(key, body):
                table[key] = body
            case operations.Await(key):
                return table.get(key)
            case operations.Look(keys):
                return [table.get(key) for key in keys]
            case operations.Count(key):
                return table.get(key, 0)
            case operations.Delete(key):
                table.pop(key, None)
            case operations.Beat():
                participant.beats = True
            case operations.Gone():
                return frozenset()
            case operations.Identify(ids):
                assert participant.node.node_id in ids
            case operations.Needed():
                return participant.needed
            case operations.IsNew():
                return participant.is_new
            case operations.LeftOut():
                pass
            case operations.Tell(text):
                participant.reasons.append(text)
        return None

    def _check(self, participant: Participant) -> None:
        outcome = participant.outcome
        if isinstance(outcome, Joined):
            # After a store is lost with a plan that nobody had read, the next store may get another plan.
            held = self.plans.setdefault((self.epoch, outcome.generation), outcome.plan)
            assert held == outcome.plan, "two plans in one generation"
            place = (self.epoch, outcome.generation, outcome.rank)
            holder = self.places.setdefault(place, participant.name)
            assert holder == participant.name, "two nodes with one rank"
            order = outcome.plan["order"]
            assert len(set(order)) == len(order)
            assert not set(order) & set(outcome.plan["spares"])
            participant.plan = outcome.plan
            participant.beats = True
            ids = self.table.get(plans.ids_key(outcome.generation, outcome.plan))
            participant.ids = plans.ids_in(ids)
            assert participant.ids[outcome.rank] == participant.name

    def pass_time(self) -> None:
        """Advance the clock until something new can happen; live nodes beat meanwhile."""
        waits = [
            each.blocked_until
            for each in self.nodes.values()
            if each.alive and each.outcome is None and each.blocked_until is not None
        ]
        until = max(self.now, min(waits, default=self.now))
        self.now = min(until, self.now + BEAT) if until > self.now else until
        for each in self.nodes.values():
            if each.alive and each.beats and each.epoch == self.epoch:
                number = self.table.get(f"beat/{each.name}", {"beat": 0})["beat"]
                self.table[f"beat/{each.name}"] = {"beat": number + 1}

    def run(self, limit: float = 2000.0) -> None:
        """Schedule fairly, until no node has anything to do."""
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


FIXED2 = Settings(min_nodes=2, max_nodes=2)
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


def test_who_comes_with_a_rank_that_is_taken_is_told_while_the_round_forms_and_later() -> None:
    for late in (False, True):
        world = World()
        names = ["a", "b"] if late else ["a"]
        for rank, name in enumerate(names):
            world.add(name, FIXED2, given_rank=rank)
        world.run(0 if not late else 3000)
        world.add("x", FIXED2, given_rank=0)
        world.run(1)
        assert world.nodes["x"].outcome == protocol.RankTaken(0, "a")
        if late:
            assert ranks_of(world, 0) == {"a": 0, "b": 1}


def test_who_comes_with_a_rank_when_all_is_over_is_told_so() -> None:
    world = World()
    for rank, name in enumerate("ab"):
        world.add(name, FIXED2, given_rank=rank)
    world.run()
    world.table["closed"] = {"closed": "the job has ended well"}
    world.add("x", FIXED2, given_rank=1)
    world.run(100)
    assert world.nodes["x"].outcome == protocol.Closed("the job has ended well")


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


def _closed_by_a(world: World) -> None:
    world.table["closed"] = {"closed": "the workers failed", "by": "a"}
    world.table.setdefault("1/call", {"closed": "the workers failed"})


@pytest.mark.parametrize("told_by_call", [True, False])
def test_a_job_that_was_closed_and_is_gone_does_not_bar_its_name(told_by_call: bool) -> None:
    world = World()
    for name in "ab":
        world.add(name, FIXED2)
    world.run()
    _closed_by_a(world)
    if not told_by_call:
        del world.table["1/call"]
    world.table["beat/a"] = {"beat": 70, "left": True}
    for name in "ab":
        world.nodes[name].alive = False
    before = world.now
    for name in "xy":
        world.add(name, FIXED2)
    world.run()
    outcomes = [world.nodes[name].outcome for name in "xy"]
    assert all(isinstance(each, Joined) for each in outcomes), outcomes
    assert "closed" not in world.table
    assert world.now - before >= protocol.LEASES_TO_OPEN * TIMING.lease
    # If that job is killed, the next one of the same name finds its round.
    world.add("late", FIXED2)
    world.run(1)
    assert world.nodes["late"].outcome is None
    assert f"{outcomes[0].generation + 1}/waiting" in world.table


def test_a_node_of_a_closed_job_that_lives_tells_newcomers() -> None:
    world = World()
    for name in "ab":
        world.add(name, FIXED2)
    world.run()
    world.add("waiting", FIXED2)
    world.run(1)
    _closed_by_a(world)
    world.nodes["a"].alive = False  # b beats on
    world.add("x", FIXED2)
    before = world.now
    world.run()
    assert (
        world.nodes["waiting"].outcome == world.nodes["x"].outcome == Closed("the workers failed")
    )
    assert world.now - before <= TIMING.lease
    assert "closed" in world.table


def test_who_waits_for_the_end_of_a_closed_job_begins_anew_when_its_records_are_gone() -> None:
    world = World()
    for name in "ab":
        world.add(name, FIXED2)
    world.run()
    _closed_by_a(world)
    for name in "ab":
        del world.nodes[name]
    for name in "xy":
        world.add(name, FIXED2)
    world.run(1)
    assert world.nodes["x"].outcome is None
    world.epoch += 1  # the last node of the job has cleared the store
    world.nodes["x"].epoch = world.nodes["y"].epoch = world.epoch
    world.table.clear()
    world.run(TIMING.lease)
    assert ranks_of(world, 0) == {"x": 0, "y": 1}


def test_a_store_that_a_node_serves_ends_with_its_job_so_closed_means_closed() -> None:
    world = World()
    for name in "ab":
        world.add(name, FIXED2)
    world.run()
    world.table["store"] = {"name": "s", "moves": 0}
    _closed_by_a(world)
    for name in "ab":
        world.nodes[name].alive = False
    world.add("x", FIXED2)
    world.run(0)
    assert world.nodes["x"].outcome == Closed("the workers failed")


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
        # The plan was out before it died: its members find out, and meet again.
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
    world.add("a", ELASTIC, generation=4, rank=0, num_nodes=4, needed=3)
    world.add("b", ELASTIC, generation=4, rank=1, num_nodes=4, needed=3)
    world.table["4/plan"] = {"by": "a", "order": [0, 1, 2, 3], "first": {"id": "a"}}
    world.table["4/ids/a"] = {"ids": list("abcd")}
    world.run(60)
    assert all(world.nodes[name].outcome is None for name in "ab")
    world.add("c", ELASTIC, generation=4, rank=2, num_nodes=4, needed=3)
    world.run(60)
    assert len(ranks_of(world, 5)) == 3


def test_who_is_found_to_have_ended_while_the_round_forms_need_not_come() -> None:
    world = World()
    alone = replace(ELASTIC, min_nodes=1)
    survivor = world.add("a", alone, generation=4, rank=0, num_nodes=3, needed=2)
    world.table["4/plan"] = {"by": "a", "order": [0, 1, 2], "first": {"id": "a"}}
    world.table["4/ids/a"] = {"ids": list("abc")}
    world.run(60)
    assert survivor.outcome is None
    survivor.needed = 1
    world.run(60)
    assert ranks_of(world, 5) == {"a": 0}


# -- answers that are lost, stores that are lost -----------------------------------------------------


@pytest.mark.parametrize("effect", [False, True], ids=["no-effect", "effect"])
@pytest.mark.parametrize("who", ["a", "b"], ids=["leader", "follower"])
@pytest.mark.parametrize("step", range(16))
def test_a_lost_answer_at_any_step_costs_no_round(step: int, who: str, effect: bool) -> None:
    world = World()
    settings = Settings(min_nodes=3, max_nodes=3)
    for name in "abc":
        world.add(name, settings)
    nodes = world.nodes
    for _ in range(step):
        for each in world.runnable():
            world.act(each)
    if nodes[who].outcome is None:
        world.retry(nodes[who], took_effect=effect)
    world.run(60)
    assert sorted(ranks_of(world, 0).values()) == [0, 1, 2], [n.operation for n in nodes.values()]


@pytest.mark.parametrize("step", range(16))
def test_a_newcomer_whose_answer_is_lost_finds_that_it_was_admitted(step: int) -> None:
    """Others wait for it in their round; if it waited for the next one, they would wait forever."""
    world = World()
    settings = Settings(min_nodes=2, max_nodes=3, last_call=0.1)
    for name in "ab":
        world.add(name, settings)
    world.run(60)
    for name in "ab":
        world.again(world.nodes[name])
    late = world.add("late", settings)
    for _ in range(step):
        for each in world.runnable():
            world.act(each)
    if late.outcome is None:
        world.retry(late, took_effect=True)
    world.run(60)
    members = ranks_of(world, 1)
    by_id = world.nodes["a"].ids
    assert sorted(members) == sorted(by_id), "who is in the plan knows it"


def test_slots_of_a_lost_store_mean_nothing_in_the_next() -> None:
    """c has not read the plan when the store is lost; in the new store, that plan gives its slot to another node."""
    world = World()
    settings = Settings(min_nodes=3, max_nodes=3)
    for name in "abc":
        world.add(name, settings)
    world.run(60)
    for name in "abc":
        world.again(world.nodes[name])
    late, late_read = world.nodes["c"], None
    while any(world.nodes[name].outcome is None for name in "ab"):
        able = [n for n in world.runnable() if n is not late or n.operation != late_read]
        for each in able:
            world.act(each)
        if not able:
            world.pass_time()
        late_read = late.operation if isinstance(late.operation, operations.Await) else None
    assert late.outcome is None
    world.lose_store()
    for name in "ab":
        world.again(world.nodes[name])
    world.run(60)
    assert ranks_of(world, 1) == {"c": 2}
    world.again(late)
    world.run(60)
    assert ranks_of(world, 2) == {"a": 0, "b": 1, "c": 2}


def test_a_node_that_was_asleep_for_many_rounds_comes_back_as_a_newcomer() -> None:
    world = World()
    for name in "abc":
        world.add(name, ELASTIC)
    world.run(60)
    for _ in range(6):
        for name in "ab":
            world.again(world.nodes[name])
        world.nodes["c"].alive = False  # silent
        world.run(60)
    world.nodes["c"].alive = True
    world.again(world.nodes["c"])
    world.run(10)
    assert world.nodes["c"].outcome is None
    for name in "ab":
        world.again(world.nodes[name])
    world.run(10)
    assert ranks_of(world, 7) == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize("step", range(0, 24, 3))
def test_a_note_that_the_store_has_moved_leads_everybody_there(step: int) -> None:
    world = World()
    for name in "abc":
        world.add(name, FIXED4)
    for _ in range(step):
        for each in world.runnable():
            world.act(each)
    moved = Moved("there", 4711, Age(1, 0, "s"))
    world.table["moved"] = notes.written(moved)
    world.run(60)
    assert [each.outcome for each in world.nodes.values()] == [moved] * 3


def test_a_round_that_was_to_go_elsewhere_is_void_where_that_store_has_ended() -> None:
    """Nodes that went there in vain come back, and all are still members of the last round."""
    world = World()
    three = replace(ELASTIC, min_nodes=3, max_nodes=3)
    for name in "abc":
        world.add(name, three)
    world.run(60)
    for name in "abc":
        world.again(world.nodes[name])
    world.table["moved"] = notes.written(Moved("there", 4711, Age(1, 1, "s")))
    world.run(60)
    for node in world.nodes.values():
        assert isinstance(node.outcome, Moved)
        node.node = replace(node.node, ended_stores=frozenset({"s"}))
        node.needed = 2
        world.start(node)
    world.run(60)
    assert ranks_of(world, 2) == {"a": 0, "b": 1, "c": 2}


def test_a_round_that_was_to_go_elsewhere_is_void_where_this_store_is_the_newer_one_now() -> None:
    """Its leader arrived before it was. The other store leads back here, so nodes that followed the plan would go in circles."""
    world = World()
    three = replace(ELASTIC, min_nodes=3, max_nodes=3)
    for name in "abc":
        world.add(name, three)
    world.run(60)
    for name in "abc":
        world.again(world.nodes[name])
    there = Moved("there", 4711, Age(1, 54, "s"))
    world.table["store"] = {"name": "t", "moves": 1}
    world.table["moved"] = notes.written(there)
    world.run(60)
    assert [each.outcome for each in world.nodes.values()] == [there] * 3
    world.table["store"] = {"name": "t", "moves": 55}
    for node in world.nodes.values():
        node.needed = 2
        world.start(node)
    world.run(60)
    assert ranks_of(world, 2) == {"a": 0, "b": 1, "c": 2}


def test_ends_heard_of_by_rank_are_not_those_of_strangers_who_met_in_an_empty_store() -> None:
    """The leader was a member of a round with the same number in the store that was lost."""
    world = World()
    one = Settings(min_nodes=1, max_nodes=2, last_call=0.0)
    world.add("a", one)
    world.run(60)
    world.lose_store()
    world.add("stranger", one)
    world.run(60)
    assert ranks_of(world, 0) == {"a": 0, "stranger": 0}
    world.again(world.nodes["a"])  # an Identify with others' ids fails in World
    world.run(60)
    settle(world)
    assert_together(world, 2)


@pytest.mark.parametrize(
    "note",
    [
        {},
        {"addr": "x", "generation": 1},
        {"addr": "", "port": 1, "generation": 1},
        {"addr": "x", "port": 0, "generation": 1},
        {"addr": 7, "generation": 1},
        {"addr": "there", "port": 4711, "generation": 0},  # it knows no more than this place does
        {"addr": "there", "port": 4711, "generation": 0, "moves": 2, "store": "a"},
        {"addr": "there", "port": 4711, "generation": 0, "moves": 3, "store": "a"},
    ],
)
def test_a_note_that_leads_nowhere_is_not_followed(note: dict[str, Any]) -> None:
    world = World()
    world.table["moved"] = note
    world.table["store"] = {"name": "b", "moves": 3}
    for name in "abcd":
        world.add(name, FIXED4)
    world.run(60)
    assert len(ranks_of(world, 0)) == 4


@pytest.mark.parametrize("name", ["\ud800", "a/b", "", "x" * 300, 7, None, ["a"]])
def test_a_record_of_a_node_that_cannot_be_named_is_no_arrival(name: Any) -> None:
    """Its id becomes part of a key that the leader reads."""
    world = World()
    world.table["0/arrivals"] = 1
    world.table["0/node/0"] = {"id": name, "host": "h"}
    for each in "abcd":
        world.add(each, FIXED4)
    world.run(60)
    assert len(ranks_of(world, 0)) == 4


@pytest.mark.parametrize(
    "facts", [{"standby": "x" * plans.MAX_ARRIVAL}, {"verdict": ["failed"]}, {"ages": [10**400]}]
)
def test_what_a_broken_member_says_fails_no_leader(facts: dict[str, Any]) -> None:
    world = World()
    world.table["0/arrivals"] = 1
    world.table["0/node/0"] = {"id": "broken", "host": "h", "last_rank": 0, "facts": facts}
    four = [world.add(each, replace(FIXED4, max_nodes=5)) for each in "abcd"]
    world.run(60)
    assert len(ranks_of(world, 0).keys() & set("abcd")) == 4
    said = [text for each in four for text in each.reasons if "ignored" in text]
    assert len(said) == ("standby" in facts)


@pytest.mark.parametrize("what", ["node/0", "node/1", "arrivals", "call", "plan", "head"])
@pytest.mark.parametrize("step", range(0, 14, 2))
def test_what_somebody_destroys_while_nodes_arrive_is_put_back(step: int, what: str) -> None:
    """No node is left in a round that cannot end: a lost plan takes its round with it."""
    world = World()
    for name in "abcd":
        world.add(name, FIXED4)
    for _ in range(step):
        for each in world.runnable():
            world.act(each)
    world.table.pop(what if what == "head" else f"0/{what}", None)
    settle(world)
    assert_together(world, 4)


def test_a_newcomer_that_saw_an_old_head_does_not_wait_for_a_round_of_old() -> None:
    """A stranger had put it back and destroyed that round's plan; restored records lead the newcomer on."""
    world = World()
    for name in "ab":
        world.add(name, ELASTIC)
    world.run()
    for _ in range(3):
        for name in "ab":
            world.again(world.nodes[name])
        world.run()
    whole = dict(world.table)
    world.table["head"] = {"generation": 1}
    del world.table["1/plan"]
    newcomer = world.add("z", ELASTIC)
    while not isinstance(newcomer.operation, operations.Await):
        world.act(newcomer)
    assert newcomer.operation.key == "1/call"
    world.table |= {key: whole[key] for key in ("head", "1/plan")}
    world.run(3 * TIMING.lease)
    assert world.table["4/waiting"] == 1, "the members see it"
    for name in "ab":
        world.again(world.nodes[name])
    world.run()
    assert set(ranks_of(world, 4)) == {"a", "b", "z"}


def test_a_count_of_waiting_nodes_that_somebody_destroys_is_put_back() -> None:
    world = World()
    for name in "abcdef":
        world.add(name, FIXED4)
    world.run(60)
    del world.table["1/waiting"]
    world.run(2 * TIMING.lease)
    assert world.table["1/waiting"] == 2


def test_a_call_that_somebody_destroys_while_its_leader_waits_is_put_back() -> None:
    """Members of the last round proceed to the next one when they see its call."""
    world = World()
    for name in "ab":
        world.add(name, Settings(min_nodes=2, max_nodes=2))
    world.run(60)
    assert len(ranks_of(world, 0)) == 2
    world.again(world.nodes["a"])
    while "1/node/0" not in world.table:
        for each in world.runnable():
            world.act(each)
    del world.table["1/call"]
    for _ in range(100):
        if "1/call" in world.table:
            break
        world.run(1)
    assert world.table["1/call"] == {"leader": "a"}
    settle(world)
    assert_together(world, 2)


# -- arbitrary schedules --------------------------------------------------------------------------


def settle(world: World, rounds: int = 12) -> None:
    """No more deaths. Members proceed to the next round for the reasons that a launcher has."""
    for _ in range(rounds):
        world.run(200)
        alive = [each for each in world.nodes.values() if each.alive]
        joined = [each for each in alive if isinstance(each.outcome, Joined)]
        again = []
        for each in joined:
            following = each.outcome.generation + 1
            room = len(each.ids) < each.settings.max_nodes
            if (
                each.epoch != world.epoch
                or f"{following}/call" in world.table
                or any(not world.nodes[name].alive for name in each.ids)
                or (room and world.table.get(f"{following}/waiting", 0))
            ):
                again.append(each)
        if not again and all(each.epoch == world.epoch for each in alive):
            break
        for each in again:
            world.again(each)


def assert_together(world: World, count: int) -> None:
    alive = [each for each in world.nodes.values() if each.alive]
    joined = [each for each in alive if isinstance(each.outcome, Joined)]
    assert len(joined) == count, [(n.name, n.operation, n.outcome) for n in alive]
    assert len({each.outcome.generation for each in joined}) == 1
    assert sorted(each.outcome.rank for each in joined) == list(range(count))
    assert all(each.outcome.plan == joined[0].outcome.plan for each in joined)


@hypothesis_settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_interleaving_with_deaths_and_losses_ends_in_one_plan_of_all_that_live(
    data: st.DataObject,
) -> None:
    least = data.draw(st.integers(1, 4), label="min")
    most = data.draw(st.integers(least, 6), label="max")
    settings = Settings(min_nodes=least, max_nodes=most, last_call=2.0)
    world = World()
    count = data.draw(st.integers(1, 7), label="nodes")
    for index in range(count):
        world.add(f"n{index}", settings)
    # Chaos: any order, deaths, and time that passes while operations are in flight.
    for _ in range(data.draw(st.integers(0, 60), label="steps")):
        runnable = world.runnable()
        action = data.draw(st.integers(0, 24), label="action")
        pending = [n for n in world.nodes.values() if n.alive and n.outcome is None]
        if action == 0 and sum(n.alive for n in world.nodes.values()) > least:
            victim = data.draw(st.sampled_from(sorted(world.nodes)), label="victim")
            world.nodes[victim].alive = False
        elif action == 1 or not runnable:
            world.pass_time()
        elif action == 2:
            joined = [n for n in world.nodes.values() if n.alive and isinstance(n.outcome, Joined)]
            if joined:  # its workers failed, so it proceeds to the next round
                world.again(data.draw(st.sampled_from(joined), label="again"))
        elif action == 3 and pending:
            unlucky = data.draw(st.sampled_from(pending), label="unlucky")
            if unlucky.epoch == world.epoch:
                world.retry(unlucky, took_effect=data.draw(st.booleans(), label="effect"))
        elif action == 4 and world.epoch < 2:
            world.lose_store()
        elif action == 5 and len(world.nodes) < 10:
            world.add(f"late{len(world.nodes)}", settings)
        else:
            world.act(data.draw(st.sampled_from(runnable), label="who"))
    settle(world)
    alive = [each for each in world.nodes.values() if each.alive]
    if len(alive) >= least:
        assert_together(world, min(most, len(alive)))
