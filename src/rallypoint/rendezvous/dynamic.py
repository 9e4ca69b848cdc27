"""Dynamic membership: the shell around :mod:`.protocol`.

It executes the protocol's operations on a store (:mod:`.record_store`), starts this node's pulse (:mod:`.liveness`), and
finds the store again when it is lost (:mod:`.home`). It makes no decisions.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, assert_never

from rallypoint import events
from rallypoint._core import addresses
from rallypoint._core.clock import MONOTONIC, Deadline
from rallypoint.errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeout,
)

from . import fields, notes, operations, plan as plans, protocol, versions
from .api import RendezvousHandler, RendezvousInfo
from .departures import Departures
from .guestbook import LOOK_EVERY, Guestbook
from .home import Home, LastRound, Recovery
from .introduction import Introduction
from .liveness import Loss, Neighbour, Pulse, WatchPost
from .notes import Moved
from .protocol import Closed, Joined, Node, RankTaken, TimedOut, Timing
from .quorum import Settings, survivors_needed
from .record_store import RecordStore
from .records import Codec
from .round_members import Members, neighbour, standbys_in


_log = logging.getLogger(__name__)

# How many nodes before its own a node looks up, so that it still has one to watch if several are lost together.
NUM_NEIGHBOURS = 4
# Seconds between the first beats of the nodes: each opens a connection for it.
BETWEEN_FIRST_BEATS = 0.0005
# Seconds before a store that did not answer is tried again.
VISIT_PAUSE = 1.0
# Seconds that leaving may take.
LEAVE_PATIENCE = 2.0

Say = Callable[[str], None]


def _new_name() -> str:
    return uuid.uuid4().hex[:16]


def _ignore(_: object) -> None:
    pass


def _ignore_nothing() -> None:
    pass


@dataclass(kw_only=True, slots=True)
class Listener:
    """Callbacks between rounds. They run in threads of the handler and must not block.

    Args:
        on_loss: a member of the round is lost.
        on_store_lost: the store is lost; the next ``next_rendezvous`` looks for it.
        on_waiting: on rank 0: the number of nodes that wait to be admitted, if there is room. Repeated
            once in a lease.
        on_left_out: a round has formed without this node; ``next_rendezvous`` waits for a later one.
    """

    on_loss: Callable[[Loss], None] = _ignore
    on_store_lost: Callable[[RendezvousConnectionError], None] = _ignore
    on_waiting: Callable[[int], None] = _ignore
    on_left_out: Callable[[], None] = _ignore_nothing


class StoreFor(Protocol):
    """Creates ``RendezvousInfo.store`` for a round, and may close that of the round before."""

    def __call__(self, records: RecordStore, generation: int) -> Any: ...

    def close(self) -> None:
        """Close the last store: the handler shuts down."""


class DynamicRendezvous(RendezvousHandler):
    """One node of a job whose members may come, go and fail.

    Args:
        home: where the job's store is.
        backend: its name.
        run_id: the job's name; jobs with different names do not see each other.
        settings: how many nodes, and how long to wait for more.
        timing: seconds to join, and of the lease.
        host: this node's host name, for messages and for the order of ranks.
        label: its rack or switch, for ``settings.by_label``.
        local_addr: the address at which other nodes reach this one; None: the one on the route to the endpoint.
        secret: the secret that all nodes of the job share; records without its MAC are ignored.
        split_brain_guard: a minority that is cut off does not continue by itself.
        given_rank: this node's rank, if ranks are fixed beforehand.
        say: prints a line to the user.
        listener: see :class:`Listener`.
        store_for: makes the store for users of a round; None: the job's own connection.
        bind: address to listen on; ``*``: all; None: the one that is announced to other nodes.
    """

    def __init__(
        self,
        home: Home,
        *,
        backend: str,
        run_id: str,
        settings: Settings,
        timing: Timing,
        host: str,
        label: str = "",
        local_addr: str | None = None,
        secret: bytes | None = None,
        split_brain_guard: bool = True,
        given_rank: int | None = None,
        say: Say = _log.info,
        listener: Listener | None = None,
        store_for: StoreFor | None = None,
        bind: str | None = None,
    ) -> None:
        self._home = home
        self._bind = bind
        self._backend = backend
        self._run_id = run_id
        self._settings = settings
        self._timing = timing
        self._local_addr = local_addr
        self._guard = split_brain_guard
        self._say = say
        self._listener = listener or Listener()
        self._store_for = store_for
        self._codec = Codec(run_id, secret)
        self._node = Node(node_id=_new_name(), host=host, label=label, given_rank=given_rank)
        serving = None if home.host is None else home.towards()
        least, most = settings.min_nodes, settings.max_nodes
        self._guestbook = Guestbook(
            Introduction(
                node_id=self._node.node_id,
                host=host,
                run_id=run_id,
                nodes=f"{least}" if least == most else f"{least}:{most}",
                given_rank=given_rank is not None,
                rallypoint=versions.rallypoint(),
                torch=versions.torch(),
                python=versions.python(),
            ),
            secret,
            say,
            "" if serving is None else f"{serving[0]}:{serving[1]}",
        )
        self._facts: Mapping[str, Any] = {}
        self._records: RecordStore | None = None
        self._pulse: Pulse | None = None
        self._post: WatchPost | None = None
        self._beats = itertools.count(1)
        self._plan: Mapping[str, Any] = {}
        self._latest: Mapping[str, Any] = {}  # also of rounds this node was no member of
        self._stop = threading.Event()
        self._departures = Departures()
        self._store_lost = False  # to the pulse, which has ended then
        self._proving = False  # the round is over, and the pulse finds out which members have ended
        self._moved = False
        self._moves = 0  # of the store, before it came to where it is now
        self._unsettled = False  # has come to the store, and was in no round yet
        self._elsewhere = False  # led to another store, which need not know our last round

    # -- torchelastic's interface ---------------------------------------------------------------

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        began = MONOTONIC.now()
        deadline = Deadline(self._timing.join)
        while True:
            try:
                records = self._connected(deadline)
                self._check_membership(records)
                outcome: protocol.Outcome = self._play(records)
                if isinstance(outcome, Joined):
                    info = self._joined(records, outcome)
                    events.emit(
                        events.RoundFormed(
                            run_id=self._run_id,
                            generation=info.generation,
                            rank=info.rank,
                            num_nodes=info.world_size,
                            seconds=round(MONOTONIC.now() - began, 6),
                        )
                    )
                    return info
                if isinstance(outcome, Moved) and not deadline.expired():
                    self._follow(records, outcome)
                    continue
            except RendezvousConnectionError as error:
                if self._stop.is_set() or self._records is None:
                    raise
                self._recover(error, deadline)
                continue
            match outcome:
                case TimedOut(_, arrived, reason, given):
                    least, most = self._settings.min_nodes, self._settings.max_nodes
                    missing: tuple[int, ...] = ()
                    if given:
                        missing = tuple(rank for rank in range(least) if rank not in given)
                        arrived = tuple(
                            f"node {rank} ({host})"
                            for rank, host in zip(given, arrived, strict=False)
                        )
                    why = reason if len(arrived) >= least else self._guestbook.said
                    raise RendezvousTimeout(self._timing.join, least, arrived, missing, most, why)
                case Closed(reason):
                    raise RendezvousClosedError(
                        f"the rendezvous {self._run_id!r} is closed: {reason}"
                    )
                case Moved(addr, port):
                    raise RendezvousConnectionError(
                        f"the job's store has moved to {addr}:{port}, and did not answer there within"
                        f" {self._timing.join:g} s; can this node reach that host?"
                    )
                case RankTaken(rank, taken_by):
                    raise ConfigError(
                        "--node-rank",
                        str(rank),
                        f"host {taken_by} has this rank in the job {self._run_id!r}",
                        "each node needs its own, and each job its own --rdzv-id or port",
                    )
                case _:
                    assert_never(outcome)

    def is_closed(self) -> bool:
        if self._records is None:
            return False
        (closed,) = self._records.look(["closed"])
        return closed is not None

    def set_closed(self) -> None:
        self.close_rendezvous("a node closed it")

    def close_rendezvous(self, reason: str) -> None:
        """Form no further round; nodes that wait for one are told ``reason``."""
        records = self._connected(Deadline(self._timing.join))
        records.claim("closed", {"closed": reason})
        if self._node.generation is not None:
            # Nodes that wait for the next round wait for its call.
            records.claim(f"{self._node.generation + 1}/call", {"closed": reason})

    def clear(self, *, well: bool) -> None:
        """The job has ended (``well`` or not), and this is its last node: remove its records from the store."""
        if self._records is not None:
            self._home.clear(self._records.store, well=well)

    def settle(self) -> bool:
        """This node no longer waits for a round. Returns whether none of the others at this store does, either."""
        records = self._records
        if records is None or not self._unsettled:
            return False
        self._unsettled = False
        return records.increment("settled") >= records.count("came")

    def num_nodes_waiting(self) -> int:
        if self._node.generation is None or self._records is None:
            return 0
        following = self._node.generation + 1
        lost = self._departures.lost()
        try:
            call, *beats = self._records.look([f"{following}/call", *(f"beat/{i}" for i in lost)])
            waiting = self._records.count(f"{following}/waiting")
        except RendezvousConnectionError:
            return 1  # the store's host is gone: the next round will show
        # A member that left in good order has finished, which is no reason for a new round. (Its process may be seen to
        # end before its last beat is read, so the loss alone does not decide.)
        missed = any(beat is None or beat.get("left") is not True for beat in beats)
        called = call is not None and "closed" not in call
        changed = missed or called or self._store_lost
        if changed:
            return max(1, waiting)
        return waiting if self._node.num_nodes < self._settings.max_nodes else 0

    def shutdown(self) -> bool:
        self._stop.set()
        self._disconnect(leaving=True)
        if self._store_for is not None:
            self._store_for.close()
        self._home.close()
        if self._post is not None:
            self._post.close()
            self._post = None
        return True

    # -- for the launcher ----------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether the store ends with this process."""
        return self._home.serves

    @property
    def store_host(self) -> str | None:
        """The host that serves the job's store, as this node reaches it; None if no node of the job does."""
        return self._home.host

    @property
    def listens_on(self) -> str | None:
        """The address on which this node must listen for the others; None: all addresses of this host."""
        return addresses.listening_address(self._bind, self._told_address())

    @property
    def lease(self) -> float:
        """Seconds of silence after which a node is lost."""
        return self._timing.lease

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan of the round this node is a member of."""
        return self._plan

    @property
    def records(self) -> RecordStore | None:
        """The connection of :meth:`next_rendezvous`; clone it for a thread of your own."""
        return self._records

    def bring(self, facts: Mapping[str, Any]) -> None:
        """Set the facts that this node gives the others in its next round (JSON values)."""
        self._facts = facts

    def leave(self, *, finished: bool) -> None:
        """Stop taking part, but serve the store, if it is here, until :meth:`shutdown`.

        Args:
            finished: tell the others that this node left in good order; otherwise it counts as lost.
        """
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.stop(leaving=finished, timeout=LEAVE_PATIENCE)

    def find_store(self) -> None:
        """Find the lost store again, at once: others may wait for this node to serve it.

        Raises:
            RendezvousConnectionError: it was not served again within the time to join.
        """
        if self._records is None:
            return
        try:
            self._records.look(["head"])
        except RendezvousConnectionError as error:
            deadline = Deadline(self._timing.join)
            self._recover(error, deadline)
            self._connected(deadline)

    def abandon_store(self) -> None:
        """The node that serves the store is about to leave: connect to the next one.

        Raises:
            RendezvousConnectionError: it was not served again within the time to join.
        """
        if self._records is None or self._home.serves or not self._plan.get("store"):
            return
        self._departures.note_ended([str(self._plan["store"])], gone=False)
        deadline = Deadline(self._timing.join)
        self._recover(
            RendezvousConnectionError("the node that serves the store is leaving"), deadline
        )
        self._connected(deadline)

    def note_gone(self, rank: int, *, certain: bool) -> None:
        """A member of the round is known to be gone: the next round need not wait for it."""
        self._departures.note_rank(rank, certain=certain)

    # -- connections ----------------------------------------------------------------------------

    def _connected(self, deadline: Deadline) -> RecordStore:
        if self._records is None:
            self._records = RecordStore(self._home.connect(deadline, self._stop), self._codec)
            self._guestbook.visit(
                self._records.store,
                serves=self._home.serves,
                newcomer=self._node.generation is None,
                should_serve=self._node.given_rank == 0,
            )
            self._note_coming(self._records)
            if self._home.serves:
                self._records.claim("store", {"name": _new_name(), "moves": 0})
        if self._post is None:
            self._post = WatchPost(self.listens_on)
        if self._pulse is not None and self._store_lost:
            # The pulse has ended, since its connection broke while this one did not. The others miss our beat.
            self._pulse.stop(leaving=False, timeout=LEAVE_PATIENCE)
            self._pulse = None
        if self._node.generation is not None:
            self._start_pulse(self._records)  # members of the last round watch us
        return self._records

    def _start_pulse(self, records: RecordStore, delay: float = 0.0) -> Pulse:
        """Start to beat, unless this node does already."""
        if self._pulse is None:
            self._store_lost = False
            self._pulse = Pulse(
                records.clone,
                self._node.node_id,
                self._timing.lease,
                self._heed_loss,
                self._heed_store,
                delay,
                self._beats,
            )
            self._pulse.start()
            if self._node.generation is not None:
                # The store was lost. The next round need not wait for members that have ended.
                self._proving = True
                self._pulse.prove(self._departures.doubtful())
        return self._pulse

    def _follow(self, records: RecordStore, moved: Moved) -> None:
        """Connect to the store that a note redirects to, if it still exists."""
        found = None
        try:
            store = self._home.visit(moved.addr, moved.port)
            if store is not None:
                found = RecordStore(store, self._codec)
                age = notes.age(*found.look(["head", "store"]))
        except RendezvousConnectionError:
            # The network may be broken. The note remains for later.
            if found is not None:
                found.close()
            self._stop.wait(VISIT_PAUSE)
            return
        if found is None or age.store != moved.age.store:
            if found is not None:
                found.close()
            ended = self._node.ended_stores | {moved.age.store}
            self._node = replace(self._node, ended_stores=ended)
            # Remove the note: it must not prevent another one, to an older store that still exists.
            note = notes.written(moved)
            records.improve("moved", lambda held: {} if held == note else None)
            return
        self._say(f"the job's store has moved to {moved.addr}:{moved.port}; connecting there")
        self._home.follow(moved.addr, moved.port)
        self._disconnect(leaving=False)
        self._records = found
        self._moves = age.moves
        self._elsewhere = True
        newcomer = self._node.generation is None
        self._guestbook.visit(found.store, serves=False, newcomer=newcomer)
        self._home.redirect(found.store)

    def _disconnect(self, *, leaving: bool) -> None:
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.stop(leaving=leaving, timeout=LEAVE_PATIENCE)
        if self._records is not None:
            self._records.close()
            self._records = None

    def _recover(self, error: RendezvousConnectionError, deadline: Deadline) -> None:
        """Connect again, to this store or its successor, or raise."""
        while True:
            try:
                self._try_recover(error, deadline)
                return
            except RendezvousConnectionError as again:
                if self._stop.is_set() or self._records is None or deadline.expired():
                    raise
                error = again  # found, but lost again at once

    def _try_recover(self, error: RendezvousConnectionError, deadline: Deadline) -> None:
        _log.info("%s; looking for it", error)
        self._disconnect(leaving=False)
        generation = self._node.generation
        last = None
        plan = self._latest if generation is None else self._plan
        if plan:
            ended = self._departures.ended()
            last = LastRound(plan=plan, node_id=self._node.node_id, dead=ended)
        recovery = self._home.recover(error, last, deadline, self._stop)
        if recovery.moved and last is not None:
            # It was silent for too long. If it is alive, it comes by itself.
            self._departures.note_gone(str(last.plan.get("store", "")))
        self._settle(recovery)

    def _settle(self, recovery: Recovery) -> None:
        """Continue with a store that may be a new one. An empty one gets the records of the last round."""
        generation = self._node.generation
        self._records = records = RecordStore(recovery.store, self._codec)
        self._departures.note_ended(recovery.dead)
        self._moved = self._moved or recovery.moved
        if recovery.moved:
            self._guestbook.visit(recovery.store, serves=self._home.serves, newcomer=False)
        if generation is None and recovery.moved:
            self._note_coming(records)
        (head, store) = records.look(["head", "store"])
        if generation is None:
            empty = recovery.moved and self._home.serves
        else:
            empty = recovery.moved or head is None
        if empty:
            self._furnish(records, generation)
        else:
            self._moves = notes.age(head, store).moves
        self._home.redirect(records.store)

    def _furnish(self, records: RecordStore, generation: int | None) -> None:
        """Write the records of the last round that the next one needs into an empty store."""
        if generation is None:
            following = 1 + fields.number(self._latest.get("generation")) if self._latest else 0
        else:
            following = generation + 1
            plan = plans.seeded(self._plan)
            if self._departures.ids:
                records.write(plans.ids_key(generation, plan), {"ids": list(self._departures.ids)})
            records.claim(f"{generation}/plan", plan)
        moves = self._moves + 1

        def head(held: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            return {"generation": following} if fields.generation(held) < following else None

        def store(held: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            age = notes.age(None, held)
            return {"name": age.store or _new_name(), "moves": moves} if age.moves < moves else None

        records.improve("head", head)
        records.improve("store", store)
        self._moves = notes.age(*records.look(["head", "store"])).moves

    def _note_coming(self, records: RecordStore) -> None:
        """Count this newcomer, so that a node that closes the rendezvous gives it time to notice."""
        if self._node.generation is None:
            records.increment("came")
            self._unsettled = True

    # -- one round ------------------------------------------------------------------------------

    def _play(self, records: RecordStore) -> protocol.Outcome:
        """Drive the protocol to its outcome."""
        node = replace(self._node, facts=self._all_facts())
        steps = protocol.next_round(node, self._settings, self._timing)
        answer: tuple[float, Any] | None = None
        while True:
            try:
                operation = next(steps) if answer is None else steps.send(answer)
            except StopIteration as stop:
                outcome: protocol.Outcome = stop.value
                return outcome
            if self._stop.is_set():
                raise RendezvousConnectionError("this node was told to stop")
            result = self._carry_out(records, operation)
            answer = (MONOTONIC.now(), result)

    def _carry_out(self, records: RecordStore, operation: operations.Operation) -> Any:
        match operation:
            case operations.Claim(key, body):
                return records.claim(key, body)
            case operations.Increment(key):
                return records.increment(key)
            case operations.Write(key, body):
                return records.write(key, body)
            case operations.Await(key, timeout):
                answer = self._wait(records, key, timeout)
                self._note_plan(key, answer)
                return answer
            case operations.Look(keys):
                bodies = records.look(keys)
                for name, found in zip(keys, bodies, strict=True):
                    self._note_plan(name, found)
                    if name == "store":
                        self._moves = notes.age(None, found).moves
                return bodies
            case operations.Count(key):
                return records.count(key)
            case operations.Delete(key):
                return records.delete(key)
            case operations.Gone():
                return self._departures.gone()
            case operations.Needed():
                return self._survivors_needed()
            case operations.Beat():
                self._start_pulse(records)
                return None
            case operations.IsNew():
                return self._moved
            case operations.LeftOut():
                return self._listener.on_left_out()
            case operations.Tell(text):
                return self._say(text)
            case _:
                assert_never(operation)

    def _wait(self, records: RecordStore, key: str, timeout: float) -> Mapping[str, Any] | None:
        """Wait for a record, and check now and then which other nodes have arrived."""
        deadline = Deadline(timeout)
        while True:
            left = deadline.remaining() or 0.0
            answer = records.wait(key, min(left, LOOK_EVERY))
            if answer is not None:
                return answer
            self._guestbook.look(records.store)
            if left <= LOOK_EVERY:
                return None

    def _note_plan(self, key: str, body: Mapping[str, Any] | None) -> None:
        """Remember the latest plan: a spare, too, must know where the store may move."""
        if body is not None and key.endswith("/plan") and "standbys" in body:
            self._latest = body

    def _check_membership(self, records: RecordStore) -> None:
        """After a redirect, this node is a member only if that store has the same last round."""
        generation = self._node.generation
        if not self._elsewhere or generation is None:
            return
        self._elsewhere = False
        (plan,) = records.look([f"{generation}/plan"])
        # A plan that was copied into an empty store has a mark after its author's name.
        theirs, ours = (str(each.get("by")).rstrip("+") for each in (plan or {}, self._plan))
        if theirs != ours:
            self._node = replace(self._node, generation=None)

    def _all_facts(self) -> Mapping[str, Any]:
        assert self._post is not None
        addr = self._told_address()
        standby = dict(self._home.standby(addr))
        return {
            **self._facts,
            "addr": self._facts.get("addr") or addr,
            "watch": [addr, self._post.port],
            "serves": self._home.serves,
            "standby": {**standby, "watch": self._post.port} if standby else {},
        }

    def _told_address(self) -> str:
        """The address that this node announces to the others."""
        return self._local_addr or self._address()

    def _address(self) -> str:
        towards = self._home.towards()
        if towards is None:
            return addresses.hostname()
        try:
            addr = addresses.address_towards(*towards, "--rdzv-endpoint")
        except ConfigError:
            # The name does not resolve now. Others use it if it is this node's.
            return towards[0] if self._home.serves else addresses.hostname()
        # Many hosts resolve their own name to 127.0.1.1; others can still reach them by the name.
        return towards[0] if addresses.is_loopback(addr) else addr

    def _survivors_needed(self) -> int:
        if not self._guard or self._node.generation is None:
            return 0
        ended = self._departures.num_ended()
        return survivors_needed(self._node.num_nodes, ended, moved=self._moved)

    def _joined(self, records: RecordStore, joined: Joined) -> RendezvousInfo:
        plan, generation = joined.plan, joined.generation
        order = plan.get("order")
        if not isinstance(order, list):
            raise RendezvousStateError(f"the plan of round {generation} has no order of nodes")
        self._plan = plan
        self._moved = False
        self.settle()
        self._node = replace(
            self._node,
            generation=generation,
            rank=joined.rank,
            slot=joined.slot,
            num_nodes=len(order),
        )
        self._departures.begin()
        if joined.rank < plans.NUM_STANDBYS:
            # Nodes that may have to serve the store, or to lead, need the ids of all members.
            (record,) = records.look([plans.ids_key(generation, plan)])
            self._departures.identify(plans.ids_in(record))
        self._watch(records, generation, joined.rank, order)
        members = Members(records, generation, order)
        store = records.store
        made = store if self._store_for is None else self._store_for(records, generation)
        return RendezvousInfo(made, joined.rank, len(order), members=members, generation=generation)

    def _watch(
        self, records: RecordStore, generation: int, rank: int, order: Sequence[int]
    ) -> None:
        count = len(order)
        pulse = self._start_pulse(records, min(rank * BETWEEN_FIRST_BEATS, self._timing.lease / 2))
        ranks = [(rank - back) % count for back in range(1, min(NUM_NEIGHBOURS, count - 1) + 1)]
        found = records.look([f"{generation}/node/{order[each]}" for each in ranks])
        nearest = [
            neighbour(each, record)
            for each, record in zip(ranks, found, strict=True)
            if record is not None
        ]
        known = {each.node_id: each for each in (*standbys_in(self._plan), *nearest)}
        known.pop(self._node.node_id, None)
        self._departures.know(list(known.values()))
        everybody = []
        if rank == 0:
            everybody = [
                Neighbour(node_id=node_id, rank=each, host="")
                for each, node_id in enumerate(self._departures.ids)
                if each != rank
            ]
        room = count < self._settings.max_nodes
        self._proving = False
        pulse.watch(
            nearest,
            everybody,
            self._look_after(generation, room=room) if rank == 0 else None,
        )

    def _look_after(self, generation: int, *, room: bool) -> Callable[[RecordStore], None]:
        """What rank 0 does at each beat: restore overwritten records, so that newcomers find the round, and notice newcomers."""
        look_for_waiting = self._look_for_waiting(generation + 1) if room else None
        plan = self._plan

        def look(records: RecordStore) -> None:
            if fields.generation(records.peek("head")) <= generation:
                # Without the plan, a newcomer would begin at round 0.
                if records.look([f"{generation}/plan"]) == [None]:
                    records.claim(f"{generation}/plan", plan)
                records.write("head", {"generation": generation + 1})
            if look_for_waiting is not None:
                look_for_waiting(records)

        return look

    def _look_for_waiting(self, generation: int) -> Callable[[RecordStore], None]:
        known = 0
        again = Deadline(None)

        def look(records: RecordStore) -> None:
            nonlocal known, again
            waiting = records.count(f"{generation}/waiting")
            # Once more after a lease: the round still runs, so a stranger has overwritten what was made of it.
            if waiting > known or (waiting and again.expired()):
                known = waiting
                again = Deadline(self._timing.lease)
                self._listener.on_waiting(waiting)

        return look

    def _heed_loss(self, loss: Loss) -> None:
        self._departures.note_loss(loss)
        if not self._proving:
            events.emit(
                events.NodeLost(
                    run_id=self._run_id,
                    generation=-1 if self._node.generation is None else self._node.generation,
                    rank=loss.neighbour.rank,
                    certain=loss.certain,
                    reason=loss.reason,
                )
            )
            self._listener.on_loss(loss)

    def _heed_store(self, error: RendezvousConnectionError) -> None:
        self._store_lost = True
        if (records := self._records) is not None:
            records.close()  # ends pending waits
        events.emit(events.StoreLost(run_id=self._run_id, reason=str(error)))
        self._listener.on_store_lost(error)
