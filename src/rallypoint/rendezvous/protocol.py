"""How one node gets into a round: the whole protocol, without any I/O.

Theory of operation
-------------------
Every round has a generation ``g`` and keys below ``g/`` in the job's store:

- ``g/call``: the first entitled node opens the round by an atomic put-if-absent and becomes its leader;
- ``g/arrivals``: a counter; adding 1 gives a node its slot. ``g/node/SLOT``: the record it puts there;
- ``g/plan``: the leader's answer, by put-if-absent: slots in rank order. There is never a second plan,
  even if another node believes it is the leader;
- ``g/leader/TERM``: the node that takes over when the previous term's leader falls silent, by put-if-absent;
- ``g/waiting``: how many nodes wait for the round to be opened.

Members of round ``g-1`` are entitled to open round ``g``; any node may open round 0. Others (late, or spare) block
in one wait for ``g/call``; they open the round themselves only if the last round's rank 0 is silent and no other
node has opened it. A record is written after the call, so the record itself is proof of life: a node that
died while it waited is in no plan. So only the leader and the members of a round beat (:mod:`.liveness`).

An operation can take effect though its answer is lost; the node then restarts the round and takes another
slot. If the plan has it under an earlier slot, it finds itself by its id. When the store is lost and an
empty one takes its place, survivors put the last plan there (:func:`.plan.seeded`). Its slots are the old store's,
so nodes find themselves by id there, too. Waiting nodes restore what somebody else destroys: each node its record and the
counters, the leader also the call. A node that saw overwritten records when it arrived may wait for a round that is
long over; once it notices, it starts over.

A joining node needs five operations (call, slot, record, plan, and deleting its record of the last
round), however many nodes there are; the leader reads every record once, hundreds in one operation.

The protocol is a generator: it yields one operation and is sent ``(now, result)``. The shell that carries the
operations out is :mod:`rallypoint.rendezvous.dynamic`; the tests interleave many such generators and kill some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import fields, kept_round, notes, plan as plans
from .lease import Leases
from .notes import Moved
from .operations import (
    Await,
    Beat,
    Claim,
    Count,
    Delete,
    Gone,
    Identify,
    Increment,
    IsNew,
    LeftOut,
    Look,
    Needed,
    Steps,
    Tell,
    Write,
)
from .quorum import Arrival, Close, NotYet, Settings, Standing, decide


# -- a node's knowledge, and the outcomes --------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """This node between two rounds.

    Args:
        node_id: unique, the same in every round.
        host: its host name, for messages.
        label: its rack or switch, or empty.
        facts: what it tells the others (JSON values).
        generation: the last round it was a member of, or None.
        rank: its rank in that round.
        num_nodes: how many members that round had.
        slot: its slot in that round.
        given_rank: the rank its user gave it, or None.
        ended_stores: names of stores that are no longer served; notes that lead there are ignored.
    """

    node_id: str
    host: str
    label: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    generation: int | None = None
    rank: int = -1
    num_nodes: int = 0
    slot: int = -1
    given_rank: int | None = None
    ended_stores: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds.

    Args:
        join: how long a round may take to form.
        lease: silence after which a node is lost.
    """

    join: float
    lease: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """This node is a member of a round."""

    generation: int
    rank: int
    slot: int
    plan: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The round did not form: the hosts that arrived, the reason, and the given ranks if there were any."""

    generation: int
    arrived: tuple[str, ...]
    reason: str
    given_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """There will be no further round."""

    reason: str


@dataclass(frozen=True, slots=True)
class RankTaken:
    """Another node was given the same rank."""

    rank: int
    host: str


Outcome = Joined | TimedOut | Closed | Moved | RankTaken

# How many of the first arrivals check on the leader often; the others check once per lease.
NUM_DEPUTIES = 3
# How many leases rank 0 must be silent before a waiting node opens a round on its own.
LEASES_TO_OPEN = 3
# How often a waiting node looks at the store, per lease.
_LOOKS_OF_WAITING = 8
# How many rounds a newcomer looks back for one that had members; the rounds after that were closed, or void.
_ROUNDS_BACK = 8


def next_round(node: Node, settings: Settings, timing: Timing) -> Steps:
    """One node's steps into its next round. Returns an :data:`Outcome`."""
    generation = None if node.generation is None else node.generation + 1
    entitled = True  # a member of the previous round may open the next
    void = 0  # void rounds since the last real one, whose members are still the current ones
    while True:
        if generation is None:
            generation, entitled, outcome = yield from _find_round(node)
            if isinstance(outcome, Closed):
                # The store may have outlived the job that was closed.
                outcome = yield from _await_end(generation, timing)
                if isinstance(outcome, _Over):
                    generation = None
                    continue
                entitled = True
            if outcome is not None:
                return outcome
            if not entitled and node.given_rank is not None:
                # Ranks are given, so a running job has all its nodes: this one belongs to another job, or was started twice.
                taken = yield from _held_by(node.given_rank, generation - 1)
                if taken is not None:
                    return taken
        if not entitled:
            ended = yield from _wait_for_call(node, generation, settings, timing)
            if isinstance(ended, _Over):
                generation = None
                continue
            if ended is not None:
                return ended
        last = generation - 1 - void
        outcome = yield from _take_part(node, generation, last, settings, timing)
        match outcome:
            case _Excluded(next_generation):
                # Too late, or one too many: from now on this node waits for the round after.
                yield LeftOut()
                node = replace(node, generation=None)
                generation, entitled, void = next_generation, False, 0
            case _Over():
                yield LeftOut()
                node = replace(node, generation=None)
                generation, void = None, 0
            case _Void(next_generation):
                void = void + 1 if next_generation == generation + 1 else 0
                generation, entitled = next_generation, True
            case _:
                return outcome


@dataclass(frozen=True, slots=True)
class _Excluded:
    next_generation: int


@dataclass(frozen=True, slots=True)
class _Void:
    next_generation: int


@dataclass(frozen=True, slots=True)
class _Over:
    """The round is long over."""


def _find_round(node: Node) -> Steps:
    """The first generation without a plan; whether a stranger may take part right away; and an outcome, or None.

    The outcome says that the job's store is elsewhere; that this node is a member of the running round without having heard
    of it; or that the job is closed in a store that no node serves, so it may be over.
    """
    shared, first = ("head", "store", "moved", "closed"), ("0/plan", "0/call")
    (_, (head, store, note, closed, *found)) = yield Look((*shared, *first))
    generation = fields.generation(head)
    moved = notes.leads_on(note, notes.age(head, store), node.ended_stores)
    if moved is not None:
        return generation, False, moved
    lasting = store is None and node.generation is None
    if generation:
        (_, found) = yield Look((f"{generation}/plan", f"{generation}/call"))
    while True:
        plan, call = found
        # A round that was closed before any node opened it stays closed for the nodes of that job.
        if plan is None and not (lasting and call is not None and "closed" in call):
            break
        generation += 1
        (_, found) = yield Look((f"{generation}/plan", f"{generation}/call"))
    if lasting and closed is not None:
        return generation, False, Closed(str(closed.get("closed")))
    joined = None
    if generation > 0 and node.slot < 0:  # only a node that knows of no round may have missed one
        (_, (plan,)) = yield Look((f"{generation - 1}/plan",))
        joined = yield from _by_id(node, generation - 1, plan or {})
    return generation, generation == 0 or call is not None, joined


def _await_end(generation: int, timing: Timing) -> Steps:
    """Wait until it is clear whether a closed job has ended: its last node may have died before it cleared the store.

    Args:
        generation: the first without a plan.
        timing: the rendezvous's timing.
    Returns:
        Closed, if a node of that job is alive; _Over, if its records are gone; None, if a new job may start with this round.
    """
    members: frozenset[str] = frozenset()
    for last in range(generation - 1, max(-1, generation - 1 - _ROUNDS_BACK), -1):
        members = frozenset((yield from _members_of(last)))
        if members:
            break
    leases: Leases[int] = Leases(timing.lease * LEASES_TO_OPEN)
    before: dict[str, int] = {}
    plan: Any = None
    while True:
        (_, (closed,)) = yield Look(("closed",))
        if closed is None:
            return _Over()
        # The node that closed it may have been in no round.
        watched = sorted(members | {fields.node_id(closed.get("by"))})
        (now, beats) = yield Look(tuple(f"beat/{each}" for each in watched))
        numbers = dict(zip(watched, map(fields.beat_number, beats), strict=True))
        if plan is not None or any(
            numbers[each] > before.get(each, numbers[each]) for each in watched
        ):
            return Closed(str(closed.get("closed")))
        before = numbers
        # Nodes that have left count as well: the last of them may be about to clear the store.
        if leases.observe(now, {0: 0}):
            yield Tell(
                "an earlier job of this name was closed, and none of its nodes is left; beginning anew"
            )
            yield Delete("closed/all_heard")
            yield Delete("closed")
            return None
        (_, plan) = yield Await(f"{generation}/plan", timing.lease / 5)


def _held_by(rank: int, generation: int) -> Steps:
    """The node with this rank in the running round; None if there is no such round."""
    (_, (held, closed)) = yield Look((f"{generation}/rank/{rank}", "closed"))
    if held is None or closed is not None:
        return None
    return RankTaken(rank, str(held.get("host")))


def _wait_for_call(node: Node, generation: int, settings: Settings, timing: Timing) -> Steps:
    """Wait until the round is opened. Returns None (take part), an outcome, or _Over if the round is already over."""
    (_, place) = yield Increment(f"{generation}/waiting")
    (now, (plan,)) = yield Look((f"{generation - 1}/plan",))
    first = fields.node_id(plans.first(plan).get("id"))
    if count := len(plans.order(plan or {})):
        full = count >= settings.max_nodes
        why = "as a spare until one is lost" if full else "to be admitted"
        yield Tell(f"the job is running with {count} nodes; waiting {why}")
    leases: Leases[int] = Leases(timing.lease * LEASES_TO_OPEN)
    while True:
        # Not for a whole lease: on a connection with nothing to send, Linux notices a silent host only seconds later.
        (now, call) = yield Await(f"{generation}/call", timing.lease / _LOOKS_OF_WAITING)
        if call is not None:
            return Closed(str(call["closed"])) if "closed" in call else None
        (now, (beat, closed, note, head, store)) = yield Look(
            (f"beat/{first}", "closed", "moved", "head", "store")
        )
        if closed is not None:
            return Closed(str(closed.get("closed")))
        moved = notes.leads_on(note, notes.age(head, store), node.ended_stores)
        if moved is not None:
            return moved
        if fields.generation(head) > generation:
            # No node will open this round: what we first saw had been overwritten, or the others continued without us.
            return _Over()
        (_, waiting) = yield Count(f"{generation}/waiting")
        while waiting < place:
            (_, waiting) = yield Increment(f"{generation}/waiting")
        if leases.observe(now, {0: fields.beat_number(beat)}):
            yield Tell("all nodes of the running round are silent; opening the next one")
            return None


def _take_part(node: Node, generation: int, last: int, settings: Settings, timing: Timing) -> Steps:
    (now, call) = yield Claim(f"{generation}/call", {"leader": node.node_id})
    if "closed" in call:
        return Closed(str(call["closed"]))
    give_up = now + timing.join
    if node.given_rank is not None:
        owner = {"id": node.node_id, "host": node.host}
        (_, held) = yield Claim(f"{generation}/rank/{node.given_rank}", owner)
        if held.get("id") != node.node_id:
            return RankTaken(node.given_rank, str(held.get("host")))
    survivor = node.generation is not None and node.generation == last
    record = {
        "id": node.node_id,
        "host": node.host,
        "label": node.label,
        "last_rank": node.rank if survivor else None,
        "given_rank": node.given_rank,
        "facts": node.facts,
    }
    if plans.arrival(0, record) is None:
        # Leaders ignore such a record, and this node could not lead a round with it.
        raise ValueError(
            f"what node {node.node_id!r} tells the others is no record: its facts may be too large"
            f" (a record has at most {plans.MAX_ARRIVAL} characters) or too deeply nested"
        )
    slot = yield from _arrive(generation, record)
    term, leader = 0, fields.node_id(call.get("leader"))
    while True:
        if leader == node.node_id:
            leader_here = _Leader(node, generation, slot, record, settings, timing, give_up)
            steps = leader_here.lead(last)
        else:
            steps = _follow(generation, slot, record, term, leader, timing, give_up)
        plan, slot = yield from steps
        match plan:
            case TimedOut():
                return (yield from _leave_round(node, generation, slot, plan))
            case _NextTerm():
                (now, held) = yield Claim(
                    f"{generation}/leader/{term + 1}", {"leader": node.node_id}
                )
                term, leader = term + 1, fields.node_id(held.get("leader"))
            case _:
                break
    if node.generation is not None and node.slot >= 0 and "closed" not in plan:
        yield Delete(f"{node.generation}/node/{node.slot}")
    return (yield from _place(node, generation, slot, plan))


def _arrive(generation: int, record: Mapping[str, Any]) -> Steps:
    """Put the record into a free slot, and return the slot."""
    while True:
        (_, filled) = yield Increment(f"{generation}/arrivals")
        (_, held) = yield Claim(f"{generation}/node/{filled - 1}", record)
        if held.get("id") == record["id"]:
            return filled - 1
        # The slot is taken, so the counter was set back: try the next one.


def _stay(generation: int, slot: int, record: Mapping[str, Any]) -> Steps:
    """Make sure that the leader finds our record, even if it or the counter is overwritten. Returns our slot."""
    (_, (held,)) = yield Look((f"{generation}/node/{slot}",))
    if held is None:
        (_, held) = yield Claim(f"{generation}/node/{slot}", record)
    if held.get("id") != record["id"]:
        # Our record was destroyed, the counter was set back, and another node now has the slot.
        return (yield from _arrive(generation, record))
    (_, filled) = yield Count(f"{generation}/arrivals")
    while filled <= slot:
        (_, filled) = yield Increment(f"{generation}/arrivals")
    return slot


def _place(node: Node, generation: int, slot: int, plan: Mapping[str, Any]) -> Steps:
    """What a plan means for the node in ``slot``."""
    if "closed" in plan:
        return Closed(str(plan["closed"]))
    if "moved" in plan:
        # The leader compared ages. Since then, this store may have become the newer one, so that the other leads back here.
        # In that case, and if the other store is no longer served, the nodes stay.
        (_, (head, store)) = yield Look(("head", "store"))
        moved = notes.leads_on(plan["moved"], notes.age(head, store), node.ended_stores)
        return _Void(generation + 1) if moved is None else moved
    if "void" in plan:
        return _Void(max(generation + 1, fields.number(plan["void"])))
    if "over" in plan:
        return _Over()
    order = plans.order(plan)
    if slot in order and plans.names(plan, order.index(slot), node.node_id):
        return Joined(generation=generation, rank=order.index(slot), slot=slot, plan=plan)
    joined = yield from _by_id(node, generation, plan)
    return _Excluded(generation + 1) if joined is None else joined


def _by_id(node: Node, generation: int, plan: Mapping[str, Any]) -> Steps:
    """This node's place in a plan that was made from an earlier record of it, or in another store."""
    order = plans.order(plan)
    if not order:
        return None
    (_, (record,)) = yield Look((plans.ids_key(generation, plan),))
    ids = plans.ids_in(record)
    if node.node_id not in ids or len(ids) != len(order):
        return None
    rank = ids.index(node.node_id)
    return Joined(generation=generation, rank=rank, slot=order[rank], plan=plan)


def _leave_round(node: Node, generation: int, slot: int, failed: TimedOut) -> Steps:
    """Give up: take the record back, unless a plan was made at this very moment."""
    yield Delete(f"{generation}/node/{slot}")
    (_, (plan,)) = yield Look((f"{generation}/plan",))
    return failed if plan is None else (yield from _place(node, generation, slot, plan))


@dataclass(frozen=True, slots=True)
class _NextTerm:
    """The term's leader fell silent."""


def _follow(
    generation: int,
    slot: int,
    record: Mapping[str, Any],
    term: int,
    leader: str,
    timing: Timing,
    give_up: float,
) -> Steps:
    """Wait for the plan while watching the leader. Returns what :meth:`_Leader.lead` does, or _NextTerm instead of a plan."""
    leases: Leases[int] = Leases(timing.lease)
    pause = timing.lease / 5 if slot <= NUM_DEPUTIES else timing.lease
    beat: Any = None
    while True:
        (now, plan) = yield Await(f"{generation}/plan", pause)
        if plan is not None:
            return plan, slot
        keys = (f"beat/{leader}", f"{generation}/leader/{term + 1}", "head")
        (now, (beat, successor, head)) = yield Look(keys)
        if fields.generation(head) > generation:
            # The plan is written before the head advances, so it exists by now, or was destroyed.
            (_, plan) = yield Claim(f"{generation}/plan", {"void": fields.generation(head)})
            return plan, slot
        slot = yield from _stay(generation, slot, record)
        (now, gone) = yield Gone()
        # The leader decides when time is up; a lease later, each node decides on its own.
        if now > give_up + timing.lease:
            arrived = yield from _hosts(generation)
            return TimedOut(generation, arrived, "no plan was made"), slot
        lost = leases.observe(now, {0: fields.beat_number(beat)})
        if lost or successor is not None or leader in gone or fields.has_left(beat):
            return _NextTerm(), slot


class _Leader:
    """The leader's part of a round: gather the arrivals, close the round, publish the plan.

    Args:
        node: this node.
        generation: the round's generation.
        slot: this node's slot; ``record`` is what it has put there.
        settings, timing: those of the rendezvous.
        give_up: when the time to form the round is up.
    """

    def __init__(
        self,
        node: Node,
        generation: int,
        slot: int,
        record: Mapping[str, Any],
        settings: Settings,
        timing: Timing,
        give_up: float,
    ) -> None:
        self._node, self._generation = node, generation
        self._slot, self._record = slot, record
        self._settings, self._timing, self._give_up = settings, timing, give_up
        self._records: dict[int, Mapping[str, Any]] = {}
        self._arrivals: dict[int, Arrival] = {}
        # How many slots are known to be filled, even if the counter was set back.
        self._known = slot + 1
        self._read_again = give_up - timing.join + timing.lease
        self._members: frozenset[str] = frozenset()
        self._leases: Leases[str] = Leases(timing.lease)
        self._silent: set[str] = set()
        self._enough_since: float | None = None
        self._started: float | None = None
        self._said = ""
        self._ignored: set[int] = set()  # slots whose records made no sense

    def lead(self, last: int) -> Steps:
        """The leader's steps. Returns a plan, or why there is none; and this node's slot."""
        yield Beat()
        ids = yield from _members_of(last)
        self._members = frozenset(ids)
        # Others may have met meanwhile in a store that was then lost; ranks in their round are not this node's ranks.
        is_own = self._node.generation == last
        if is_own and ids[self._node.rank : self._node.rank + 1] == (self._node.node_id,):
            yield Identify(ids)
        while True:
            filled, plan = yield from self._read()
            if plan is not None:
                return plan, self._slot
            own = self._arrivals.get(self._slot)
            if own is None or own.node_id != self._node.node_id:
                self._slot = yield from _stay(self._generation, self._slot, self._record)
                self._known = max(self._known, self._slot + 1)
                continue
            now, standing = yield from self._standing()
            match decide(now, self._settings, standing):
                case Close(order, spares, _reason):
                    plan = yield from self._publish(order, spares)
                    return plan, self._slot
                case NotYet() as not_yet:
                    if now >= self._give_up:
                        return self._timed_out(not_yet), self._slot
                    yield from self._wait(now, filled, not_yet)

    def _read(self) -> Steps:
        """Read what is new. Returns the number of slots, and a plan if the round has one or must not form here."""
        generation = self._generation
        (now, filled) = yield Count(f"{generation}/arrivals")
        filled = max(filled, self._known)
        self._started = now if self._started is None else self._started
        if now >= self._read_again:
            # Another node's record may have taken the place of one that was destroyed.
            self._read_again = now + self._timing.lease
            self._records.clear()
            self._arrivals.clear()
        fresh = tuple(each for each in range(filled) if each not in self._records)
        keys = tuple(f"{generation}/node/{each}" for each in fresh)
        shared = (f"{generation}/plan", "head", "closed", "moved", "store", f"{generation}/call")
        (_, found) = yield Look((*shared, *keys))
        (plan, head, closed, note, store, call), found = found[: len(shared)], found[len(shared) :]
        if plan is not None:
            return filled, plan  # another leader's, or our own if the answer was lost
        instead: Mapping[str, Any] | None = None
        moved = notes.leads_on(note, notes.age(head, store), self._node.ended_stores)
        if moved is not None:
            instead = {"moved": notes.written(moved)}
        elif closed is not None:
            instead = {"closed": closed.get("closed")}
        elif fields.generation(head) > generation:
            instead = {"void": fields.generation(head)}
        if instead is not None:
            (_, plan) = yield Claim(f"{generation}/plan", instead)
            return filled, plan
        if call is None:
            # The call was destroyed, and members of the last round and nodes that wait to be admitted need it.
            yield Claim(f"{generation}/call", {"leader": self._node.node_id})
        for each, body in zip(fresh, found, strict=True):
            if body is not None:
                self._records[each] = body
                if (arrival := plans.arrival(each, body)) is not None:
                    self._arrivals[each] = arrival
                elif each not in self._ignored:
                    self._ignored.add(each)
                    yield Tell(
                        f"ignored what is in slot {each} of round {generation}: no node's record"
                    )
        return filled, None

    def _standing(self) -> Steps:
        """The time, and what :func:`.quorum.decide` needs to know."""
        here = {arrival.node_id for arrival in self._arrivals.values()}
        missing = sorted(self._members - here)
        if missing:
            (now, beats) = yield Look(tuple(f"beat/{each}" for each in missing))
            by_id = dict(zip(missing, beats, strict=True))
            numbers = {each: fields.beat_number(beat) for each, beat in by_id.items()}
            self._silent.update(self._leases.observe(now, numbers))
            self._silent.update(each for each, beat in by_id.items() if fields.has_left(beat))
        (_, gone) = yield Gone()
        # A node that has arrived is not gone, even if it was reported lost: its record is newer than the call.
        gone = frozenset((gone | self._silent) - here)
        (now, waiting) = yield Count(f"{self._generation}/waiting")
        needed, wanted = 0, kept_round.wanted(self._records.values())
        if wanted:
            (now, is_new) = yield IsNew()
            wanted = wanted if is_new else 0
        if self._node.generation is not None:
            (now, needed) = yield Needed()
        return now, Standing(
            arrivals=self._arrivals,
            first_round=not self._members,
            missing=frozenset(missing) - gone,
            waiting=waiting,
            gone=gone,
            survivors_needed=needed,
            wanted=wanted,
            enough_since=self._enough_since,
            out_of_time=now >= self._give_up,
        )

    def _publish(self, order: Sequence[int], spares: Sequence[int]) -> Steps:
        """Close the round. Returns the plan in force, which may be another leader's."""
        generation, arrivals, records = self._generation, self._arrivals, self._records
        ids = [arrivals[slot].node_id for slot in order]
        # A slot is taken once, so no second attempt of this node writes under the same name.
        plan = plans.make(f"{self._node.node_id}.{self._slot}", generation, order, spares, records)
        yield Write(plans.ids_key(generation, plan), {"ids": ids})
        here = {arrival.node_id for arrival in arrivals.values()}
        if ages := plans.ages([records[slot] for slot in order]):
            plan["ages"] = list(ages)
        plan["restarts"] = plans.restarts(
            [records[slot] for slot in order], whole=not self._members - here
        )
        (_, held) = yield Claim(f"{generation}/plan", plan)
        yield Write("head", {"generation": generation + 1})
        yield from _clear(generation - 2)
        return held

    def _timed_out(self, not_yet: NotYet) -> TimedOut:
        arrivals = self._arrivals.values()
        given = tuple(each.given_rank for each in arrivals if each.given_rank is not None)
        hosts = tuple(each.host for each in arrivals)
        return TimedOut(self._generation, hosts, not_yet.reason, given)

    def _wait(self, now: float, filled: int, not_yet: NotYet) -> Steps:
        """Wait for the next arrival, or until time alone may decide; tell the user what is awaited."""
        assert self._started is not None
        if self._enough_since is None and not_yet.enough:
            self._enough_since = now
        if not_yet.reason != self._said and now - self._started > SILENCE:
            self._said = not_yet.reason
            until = min(self._give_up, not_yet.look_at or self._give_up)
            yield Tell(self._said, f"; waiting for up to {until - now:.0f} s")
        # Wait for a slot that is taken but not yet filled, if there is one; otherwise for the slot that may decide the round.
        hole = next((each for each in range(filled) if each not in self._records), None)
        awaited = max(filled, not_yet.slots - 1) if hole is None else hole
        until = min(self._give_up, now + self._timing.lease / 5, not_yet.look_at or self._give_up)
        key = f"{self._generation}/node/{awaited}"
        (_, arrived) = yield Await(key, max(0.001, until - now))
        if arrived is not None:
            self._known = max(self._known, awaited + 1)


# How long a leader waits before it tells the user what is awaited.
SILENCE = 3.0


def _members_of(generation: int) -> Steps:
    """The ids of a round's members, by rank; none before the first round."""
    (_, (plan,)) = yield Look((f"{generation}/plan",))
    if plan is None or "by" not in plan:
        return ()
    (_, (record,)) = yield Look((plans.ids_key(generation, plan),))
    return plans.ids_in(record)


def _clear(generation: int) -> Steps:
    """Remove the records of an old round, except its plan, which stays as a mark."""
    if generation < 0:
        return
    (_, (plan,)) = yield Look((f"{generation}/plan",))
    if plan is None or "over" in plan:
        return
    yield Delete(plans.ids_key(generation, plan))
    for name in ("call", "arrivals", "waiting"):
        yield Delete(f"{generation}/{name}")
    yield Write(f"{generation}/plan", {"over": True})


def _hosts(generation: int) -> Steps:
    """The host names of all nodes that have arrived, for an error."""
    (_, filled) = yield Count(f"{generation}/arrivals")
    (_, found) = yield Look(tuple(f"{generation}/node/{slot}" for slot in range(min(filled, 4096))))
    return tuple(str(record.get("host")) for record in found if record is not None)
