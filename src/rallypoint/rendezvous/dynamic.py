"""Dynamic membership: the shell around :mod:`.protocol`.

It executes the protocol's operations on the job's store (:mod:`.connection`) and watches the members of a round
(:mod:`.round_watch`). It makes no decisions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, assert_never

from rallypoint import events
from rallypoint._core import addresses
from rallypoint._core.clock import MONOTONIC, Deadline
from rallypoint.errors import (
    ConfigError,
    RallyError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeout,
)

from . import operations, plan as plans, protocol, versions
from .api import RendezvousHandler, RendezvousInfo
from .connection import Connection, Standing, new_name
from .departures import Departures
from .guestbook import LOOK_EVERY, Guestbook
from .home import Home
from .introduction import Introduction
from .liveness import Loss
from .notes import Moved
from .protocol import Closed, Joined, Node, RankTaken, TimedOut, Timing
from .quorum import Settings, survivors_needed
from .record_store import RecordStore
from .records import Codec
from .round_members import Members
from .round_watch import RoundWatch


_log = logging.getLogger(__name__)

Say = Callable[[str], None]

# How long the last node keeps the store, so that waiting nodes can read that they are not needed.
WAITING_PATIENCE = 2.0


# The record in which members tell waiting nodes what to do meanwhile.
ADVICE = "advice"


def _ignore(_: object) -> None:
    pass


def _ignore_nothing() -> None:
    pass


@dataclass(kw_only=True, slots=True)
class Listener:
    """Callbacks between rounds. They run on the handler's threads and must not block.

    Args:
        on_loss: a member of the round is lost.
        on_store_lost: the store is lost; the next ``next_rendezvous`` looks for it.
        on_waiting: on rank 0, the number of nodes that wait to be admitted, if there is room. Repeated
            once per lease.
        on_left_out: a round has formed without this node; ``next_rendezvous`` waits for a later one.
        on_advice: while this node waits to be admitted: what members wrote for waiting nodes (:data:`ADVICE`), when it changes.
    """

    on_loss: Callable[[Loss], None] = _ignore
    on_store_lost: Callable[[RendezvousConnectionError], None] = _ignore
    on_waiting: Callable[[int], None] = _ignore
    on_left_out: Callable[[], None] = _ignore_nothing
    on_advice: Callable[[Mapping[str, Any]], None] = _ignore


class StoreFor(Protocol):
    """Creates ``RendezvousInfo.store`` for a round, and may close the previous round's."""

    def __call__(self, records: RecordStore, generation: int) -> Any: ...

    def close(self) -> None:
        """Close the last store, because the handler is shutting down."""


class DynamicRendezvous(RendezvousHandler):
    """One node of a job whose members may come, go and fail.

    Args:
        home: where the job's store is.
        backend: the backend's name.
        run_id: the job's name; jobs with different names do not see each other.
        settings: how many nodes, and how long to wait for more.
        timing: how long a round may take to form, and the length of the lease.
        host: this node's host name, for messages and for the order of ranks.
        label: this node's rack or switch, for ``settings.by_label``.
        local_addr: the address at which other nodes reach this one; None: the local address on the route to the endpoint.
        secret: the secret that all nodes of the job share; records without its MAC are ignored.
        split_brain_guard: whether a minority that is cut off must not continue on its own.
        given_rank: this node's rank, if ranks are fixed beforehand.
        say: prints a line to the user.
        listener: see :class:`Listener`.
        store_for: makes the store for users of a round; None: they get the job's own connection.
        bind: address to listen on; ``*``: all; None: the one that is announced to other nodes.
        clears: the last node of a round to shut down removes the job's records from a store that outlives the nodes. A
            launcher decides that itself and calls :meth:`clear`.
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
        clears: bool = False,
    ) -> None:
        self._home = home
        self._clears = clears
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
        self._facts: Mapping[str, Any] = {}
        self._arrived: int | None = None
        self._advice: Mapping[str, Any] | None = None
        self._told = ""
        self._stop = threading.Event()
        self._is_meeting = False  # in next_rendezvous, maybe in another thread, or that has failed
        self._departures = Departures()
        self._standing = standing = Standing(
            node=Node(node_id=new_name(), host=host, label=label, given_rank=given_rank)
        )
        serving = None if home.host is None else home.towards()
        least, most = settings.min_nodes, settings.max_nodes
        self._guestbook = Guestbook(
            Introduction(
                node_id=standing.node.node_id,
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
        self._watch = RoundWatch(
            standing.node.node_id,
            timing.lease,
            self._departures,
            on_loss=self._heed_loss,
            on_store_lost=self._heed_store,
            on_waiting=self._listener.on_waiting,
        )
        self._connection = Connection(
            home,
            Codec(run_id, secret),
            standing=standing,
            guestbook=self._guestbook,
            departures=self._departures,
            watch=self._watch,
            stop=self._stop,
            say=say,
        )

    # -- torchelastic's interface ---------------------------------------------------------------

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._is_meeting = True
        try:
            info = self._meet()
        except RendezvousClosedError:
            self._is_meeting = False
            raise
        self._is_meeting = False
        return info

    def _meet(self) -> RendezvousInfo:
        began = MONOTONIC.now()
        deadline = Deadline(self._timing.join)
        self._arrived = None
        self._told = ""
        while True:
            try:
                records = self._connected(deadline)
                self._connection.check_membership(records)
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
                    self._connection.follow(records, outcome)
                    continue
            except RendezvousConnectionError as error:
                if self._stop.is_set() or self.records is None:
                    raise
                self._connection.recover(error, deadline)
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
                    self._note_heard(records)
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
        if self.records is None:
            return False
        (closed,) = self.records.look(["closed"])
        return closed is not None

    def set_closed(self) -> None:
        self.close_rendezvous("a node closed it")

    def close_rendezvous(self, reason: str) -> None:
        """Form no further round; nodes that wait for one are told ``reason``."""
        records = self._connected(Deadline(self._timing.join))
        node_id, generation = self._standing.node.node_id, self._standing.node.generation
        if generation is None and self._outlives:
            # While one of the job's nodes beats, newcomers are told that it is closed; after that they start a new job.
            self._watch.start(records, member=False)
        records.claim("closed", {"closed": reason, "by": node_id})
        if generation is not None:
            # Nodes that wait for the next round wait for its call.
            records.claim(f"{generation + 1}/call", {"closed": reason})

    def clear(self, *, well: bool) -> None:
        """Remove the job's records from the store. The job has ended, ``well`` or not, and this is its last node."""
        if self.records is not None:
            # The next beat would restore the round's records, and the next job of this name would take that round to be running.
            self._watch.stop(leaving=True)
            self._home.clear(self.records.store, well=well)

    def await_settled(self, records: RecordStore) -> None:
        """Wait until all waiting nodes have read that there will be no round, or time out: some may have died silently."""
        if records.count("came") > records.count("settled"):
            records.wait("closed/all_heard", WAITING_PATIENCE)

    def settle(self) -> bool:
        """Record that this node no longer waits for a round. Returns whether no other node at this store waits, either."""
        return self._connection.settle()

    def num_nodes_waiting(self) -> int:
        node = self._standing.node
        if node.generation is None or self.records is None:
            return 0
        following = node.generation + 1
        lost = self._departures.lost()
        try:
            call, *beats = self.records.look([f"{following}/call", *(f"beat/{i}" for i in lost)])
            waiting = self.records.count(f"{following}/waiting")
        except RendezvousConnectionError:
            return 1  # the store's host is gone: let the next round find out
        # A member that left in good order has finished, which is no reason for a new round. (Its process may be seen to
        # exit before its last beat is read, so the loss alone does not decide.)
        missed = any(beat is None or beat.get("left") is not True for beat in beats)
        called = call is not None and "closed" not in call
        changed = missed or called or self._watch.store_lost
        if changed:
            return max(1, waiting)
        return waiting if node.num_nodes < self._settings.max_nodes else 0

    def shutdown(self, *, finished: bool = True) -> bool:
        """As :meth:`.RendezvousHandler.shutdown`.

        Args:
            finished: as in :meth:`leave`.
        """
        # While this node is meeting, or after that failed, the others may still form the round with it. So it must count as
        # lost: if its last beat said that it left in good order, they would take it to have finished.
        leaving = finished and not self._is_meeting
        self._stop.set()
        if self._clears:
            self._count_out(leaving=leaving)
        self._connection.close(leaving=leaving)
        if self._store_for is not None:
            self._store_for.close()
        self._home.close()
        self._watch.close()
        return True

    def _note_heard(self, records: RecordStore) -> None:
        """Record that this node has read that the rendezvous is closed. The last node to leave waits until all have."""
        if not self._clears:
            return
        try:
            if self.settle():
                records.write("closed/all_heard", {})
        except RallyError as error:
            _log.info("the others cannot be told that this node has heard: %s", error)

    def _count_out(self, *, leaving: bool) -> None:
        """Count this node among those of its round that have left. The last one to leave clears a store that outlives them."""
        node, records = self._standing.node, self.records
        if node.generation is None or records is None or not self._outlives:
            return
        self._watch.stop(leaving=leaving)
        if self._watch.store_lost:
            return
        own = None
        try:
            own = records.clone()  # another thread may be waiting on the current connection
            if own.increment(f"{node.generation}/left") < node.num_nodes:
                return
            (closed,) = own.look(["closed"])
            if closed is not None:
                self.await_settled(own)
            elif own.count("came") > own.count("settled"):
                return  # a waiting node opens the next round
            self._home.clear(own.store, well=False)
        except RallyError as error:
            _log.info("the job's records stay in the store: %s", error)
        finally:
            if own is not None:
                own.close()

    @property
    def _outlives(self) -> bool:
        """Whether the store outlives the job's nodes."""
        return not self._home.serves and self._home.host is None

    # -- for the launcher ----------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether the store ends with this process."""
        return self._home.serves

    @property
    def store_host(self) -> str | None:
        """The host that serves the job's store, as this node addresses it; None if no node of the job serves it."""
        return self._home.host

    @property
    def listens_on(self) -> str | None:
        """The address on which this node must listen for the others; None: all of this host's addresses."""
        return addresses.listening_address(self._bind, self._told_address())

    @property
    def lease(self) -> float:
        """Seconds of silence after which a node is lost."""
        return self._timing.lease

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan of the round this node is a member of."""
        return self._standing.plan

    @property
    def arrived(self) -> int | None:
        """How many nodes have arrived for the round that is forming, as far as this node knows; 0: this node waits to be
        admitted; None: nothing is known yet."""
        return self._arrived

    @property
    def records(self) -> RecordStore | None:
        """The connection of :meth:`next_rendezvous`; clone it for a thread of your own."""
        return self._connection.records

    def bring(self, facts: Mapping[str, Any]) -> None:
        """Set the facts that this node tells the others in its next round (JSON values)."""
        self._facts = facts

    def leave(self, *, finished: bool) -> None:
        """Stop taking part, but go on serving the store, if this node does, until :meth:`shutdown`.

        Args:
            finished: tell the others that this node left in good order; otherwise it counts as lost.
        """
        self._watch.stop(leaving=finished)

    def find_store(self) -> None:
        """Find the lost store again, without delay: others may be waiting for this node to serve it.

        Raises:
            RendezvousConnectionError: it was not served again within the time to join.
        """
        if self.records is None:
            return
        try:
            self.records.look(["head"])
        except RendezvousConnectionError as error:
            deadline = Deadline(self._timing.join)
            self._connection.recover(error, deadline)
            self._connected(deadline)

    def abandon_store(self) -> None:
        """Connect to the next store, because the node that serves the current one is about to leave.

        Raises:
            RendezvousConnectionError: it was not served again within the time to join.
        """
        if self.records is None or self._home.serves or not self.plan.get("store"):
            return
        self._departures.note_ended([str(self.plan["store"])], gone=False)
        deadline = Deadline(self._timing.join)
        self._connection.recover(
            RendezvousConnectionError("the node that serves the store is leaving"), deadline
        )
        self._connected(deadline)

    def note_gone(self, generation: int, rank: int, *, certain: bool) -> None:
        """Record that a member of a round is gone: the next round need not wait for it. News of an earlier round is ignored."""
        if generation == self._standing.node.generation:
            self._departures.note_rank(rank, certain=certain)

    def _connected(self, deadline: Deadline) -> RecordStore:
        records = self._connection.open(deadline)
        if self._stop.is_set():
            raise RendezvousConnectionError("this node was told to stop")
        if not self._watch.listens:
            self._watch.listen(self.listens_on)
        self._watch.stop_ended()
        if self._standing.node.generation is not None:
            self._watch.start(records, member=True)  # members of the last round watch this node
        return records

    # -- one round ------------------------------------------------------------------------------

    def _play(self, records: RecordStore) -> protocol.Outcome:
        """Run the protocol to its outcome."""
        node = replace(self._standing.node, facts=self._all_facts())
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
                if key.endswith("/waiting"):
                    self._arrived = 0
                return self._note_count(key, records.increment(key))
            case operations.Write(key, body):
                return records.write(key, body)
            case operations.Await(key, timeout):
                answer = self._wait(records, key, timeout)
                self._note_plan(key, answer)
                return answer
            case operations.Look(keys):
                bodies = self._connection.look(records, keys)
                for name, found in zip(keys, bodies, strict=True):
                    self._note_plan(name, found)
                    if name == "store":
                        self._connection.note_store(found)
                return bodies
            case operations.Count(key):
                return self._note_count(key, records.count(key))
            case operations.Delete(key):
                return records.delete(key)
            case operations.Gone():
                return self._departures.gone()
            case operations.Identify(ids):
                return self._departures.identify(ids)
            case operations.Needed():
                return self._survivors_needed()
            case operations.Beat():
                self._watch.start(records, member=self._standing.node.generation is not None)
                return None
            case operations.IsNew():
                return self._connection.is_new
            case operations.LeftOut():
                return self._listener.on_left_out()
            case operations.Tell(text, None):
                return self._tell(text)
            case operations.Tell(text, rest):
                # Name the place: nodes that were given different places do not see each other.
                towards = self._home.towards()
                place = "" if towards is None else f", at {towards[0]}:{towards[1]}"
                return self._tell(f"{text}{place}{rest}")
            case _:
                assert_never(operation)

    def _tell(self, text: str) -> None:
        """Tell the user, unless the last message was the same: a spare waits for the same thing in every round."""
        if text != self._told:
            self._told = text
            self._say(text)

    def _wait(self, records: RecordStore, key: str, timeout: float) -> Mapping[str, Any] | None:
        """Wait for a record, checking now and then which other nodes have arrived."""
        deadline = Deadline(timeout)
        while True:
            left = deadline.remaining() or 0.0
            answer = records.wait(key, min(left, LOOK_EVERY))
            if answer is not None:
                return answer
            self._guestbook.look(records.store)
            if key.endswith("/call"):
                self._look_for_advice(records)
            if left <= LOOK_EVERY:
                return None

    def _look_for_advice(self, records: RecordStore) -> None:
        (advice,) = records.look([ADVICE])
        if advice is not None and advice != self._advice:
            self._advice = advice
            self._listener.on_advice(advice)

    def _note_plan(self, key: str, body: Mapping[str, Any] | None) -> None:
        """Remember the latest plan."""
        if body is not None and key.endswith("/plan") and "standbys" in body:
            self._standing.latest = body

    def _note_count(self, key: str, count: int) -> int:
        """Remember how many nodes have arrived."""
        if key.endswith("/arrivals"):
            self._arrived = count
        return count

    def _all_facts(self) -> Mapping[str, Any]:
        addr = self._told_address()
        standby = dict(self._home.standby(addr))
        return {
            **self._facts,
            "addr": self._facts.get("addr") or addr,
            "watch": [addr, self._watch.port],
            "serves": self._home.serves,
            "standby": {**standby, "watch": self._watch.port} if standby else {},
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
            # The name does not resolve here now. If it is this node's name, the others can use it.
            return towards[0] if self._home.serves else addresses.hostname()
        # Many hosts resolve their own name to 127.0.1.1; others can still reach them by that name.
        return towards[0] if addresses.is_loopback(addr) else addr

    def _survivors_needed(self) -> int:
        node = self._standing.node
        if not self._guard or node.generation is None:
            return 0
        ended = self._departures.num_ended()
        return survivors_needed(node.num_nodes, ended, moved=self._connection.moved)

    def _joined(self, records: RecordStore, joined: Joined) -> RendezvousInfo:
        plan, generation = joined.plan, joined.generation
        order = plan.get("order")
        if not isinstance(order, list):
            raise RendezvousStateError(f"the plan of round {generation} has no order of nodes")
        self._standing.plan = plan
        self._connection.begin_round()
        self._standing.node = replace(
            self._standing.node,
            generation=generation,
            rank=joined.rank,
            slot=joined.slot,
            num_nodes=len(order),
        )
        self._departures.begin()
        read = partial(self._connection.look, records)
        if joined.rank < plans.NUM_STANDBYS:
            # Nodes that may have to serve the store, or to lead, need the ids of all members.
            (record,) = read([plans.ids_key(generation, plan)])
            self._departures.identify(plans.ids_in(record))
        room = len(order) < self._settings.max_nodes
        self._watch.watch(records, generation, joined.rank, plan, room=room, read=read)
        members = Members(records, generation, order)
        store = records.store
        made = store if self._store_for is None else self._store_for(records, generation)
        return RendezvousInfo(made, joined.rank, len(order), members=members, generation=generation)

    def _heed_loss(self, loss: Loss) -> None:
        events.emit(
            events.NodeLost(
                run_id=self._run_id,
                generation=loss.neighbour.generation,
                rank=loss.neighbour.rank,
                certain=loss.certain,
                reason=loss.reason,
            )
        )
        self._listener.on_loss(loss)

    def _heed_store(self, error: RendezvousConnectionError) -> None:
        self._connection.interrupt()
        events.emit(events.StoreLost(run_id=self._run_id, reason=str(error)))
        self._listener.on_store_lost(error)
