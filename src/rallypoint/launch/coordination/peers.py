"""Several nodes: how this supervisor communicates with the others.

Theory of operation
-------------------
The nodes meet in a rendezvous (:mod:`rallypoint.rendezvous.dynamic`) and then share a journal (:mod:`.journal`) in the
job's store. So every node sees the same first failure and the same joins and losses, and reaches the same decision on
its own.

There are three threads. Each has its own connection, so a blocked wait delays nothing else. One executes requests
(join, tell, find the store again), one follows the journal of the current generation, and the rendezvous' pulse sends
heartbeats and watches the neighbour. What they learn is queued as an event, and a byte in a pipe wakes the
supervisor. Clocks of two hosts are never compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rallypoint._core import addresses, env as environment
from rallypoint._core.clock import Deadline
from rallypoint.errors import (
    RallyError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
)
from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.output.failure import (
    WorkerFailure,
    failures_from_json,
)
from rallypoint.launch.server.job_store import hosting
from rallypoint.rendezvous import plan as plans
from rallypoint.rendezvous.api import RendezvousInfo
from rallypoint.rendezvous.dynamic import ADVICE, DynamicRendezvous, Listener
from rallypoint.rendezvous.home import ENDED_WELL, STOPPED
from rallypoint.rendezvous.kept_round import Kept
from rallypoint.rendezvous.liveness import Loss
from rallypoint.rendezvous.record_store import RecordStore

from . import network, step_tables, tally
from .interface import (
    Advice,
    CoordinationEvent,
    CoordinationFailed,
    NodeAsked,
    NodeFacts,
    NotNeeded,
    PeerEvent,
    RoundReady,
    ServeStore,
)
from .journal import Journal
from .journal_reader import NO_ROUND, JournalReader, Round
from .meeting import rendezvous_for
from .node_questions import NodeQuestions
from .tally import Tally


# How long leaving may take. The node that serves the store waits until the others have read the last entries.
LEAVE_PATIENCE = 5.0
# At most this many characters of another node's reason are shown.
MAX_REASON = 300
# How long the node that serves the store stays for nodes that have not read that it is leaving: one may be suspended.
FAREWELL_PATIENCE = 3.0

Say = Callable[[str], None]


class PeerNodes:
    """Implements :class:`~rallypoint.launch.coordination.interface.Coordination` for several nodes.

    Args:
        config: this node's config.
        say: prints a line for the person at the terminal.
    """

    def __init__(self, config: LaunchConfig, say: Say) -> None:
        self._config = config
        self._say = say
        self._lease = config.rendezvous.lease
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._events: list[CoordinationEvent] = []
        self._reports: tuple[WorkerFailure, ...] = ()
        self._round = NO_ROUND
        self._broken = False
        self._network_remark = ""
        self._ending = ""  # what waiting nodes are told; empty: the supervisor decides
        self._stop = threading.Event()
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._rendezvous: DynamicRendezvous | None = None
        self._worker = threading.Thread(target=self._work, name="rally-peers", daemon=True)
        self._reader: JournalReader | None = None
        self._joining = False
        self._taken = NO_ROUND.generation  # the last round that the supervisor has heard of
        self._questions: NodeQuestions | None = None
        self._aside = threading.local()  # per thread: a connection for a single request

    # -- called by the supervisor ---------------------------------------------------------------

    @property
    def serves_store(self) -> bool | None:
        rank = self._config.rendezvous.node_rank
        return None if rank is None else rank == 0

    @property
    def broken(self) -> bool:
        return self._broken

    @property
    def arrived(self) -> int | None:
        return None if self._rendezvous is None else self._rendezvous.arrived

    def fileno(self) -> int:
        return self._read

    def join(self, generation: int, facts: NodeFacts) -> None:
        if not self._worker.is_alive():
            listener = Listener(
                on_loss=self._heed_loss,
                on_store_lost=self._heed_store_lost,
                on_waiting=self._heed_waiting,
                on_left_out=self._heed_left_out,
                on_advice=lambda body: self._post(Advice(body)),
            )
            # Raises at once if the port is in use.
            prepare = hosting(lambda *both: self._post(ServeStore(*both)))
            self._rendezvous = rendezvous_for(self._config, self._say, listener, prepare)
            self._worker.start()
        self._joining = True
        self._requests.put(lambda: self._meet(facts))

    def tell(
        self, what: str, generation: int, failures: tuple[WorkerFailure, ...], reason: str = ""
    ) -> None:
        told = tally.told(failures, self._round.num_nodes)
        match what:
            case "done":
                self._requests.put(lambda: self._count_done(generation))
            case "report":
                self._ask(lambda: self._report(told))
            case "leaving":
                self._requests.put(lambda: self._say_farewell(generation, reason))
            case "told":
                self._requests.put(lambda: self._count_told(generation))
            case "in session" | "out of session" | "not kept" | "waiting":
                self._requests.put(lambda: self._append(what, generation))
            case "failed" if failures and not reason:
                kind = "symptoms" if all(each.is_echo() for each in failures) else "failures"
                self._requests.put(lambda: self._tell_failed(kind, generation, told))
            case _:
                more = {"failures": told} | ({"reason": reason} if reason else {})
                if what == "stopped":
                    self._ask(lambda: self._stop_others(generation, more))
                    return
                self._requests.put(lambda: self._append(what, generation, **more))

    def tell_loss(self, generation: int, failure: WorkerFailure, *, survivors: bool) -> None:
        told = tally.told((failure,), self._round.num_nodes)
        more = {"failures": told, "survivors": survivors}
        self._requests.put(lambda: self._append("worker lost", generation, **more))

    def tell_standstill(
        self, generation: int, meeting: int, progress: Mapping[int, Mapping[int, int]]
    ) -> None:
        more = {"meeting": meeting, "progress": step_tables.to_json(progress)}
        self._requests.put(lambda: self._append("standstill", generation, **more))

    def advise(self, body: Mapping[str, Any]) -> None:
        def write() -> None:
            with contextlib.suppress(ValueError):  # more than a record may hold
                self._records().write(ADVICE, body)

        self._requests.put(write)

    def ask_nodes(
        self, question: Mapping[str, Any], patience: float, nodes: frozenset[int] | None = None
    ) -> dict[int, dict[str, Any] | None]:
        current = self._round
        if current is NO_ROUND or current.unheard or self._questions is None:
            return {}
        return self._questions.ask(question, patience, nodes)

    def answer(self, asked: NodeAsked, body: Mapping[str, Any]) -> None:
        if asked.generation == self._round.generation and self._questions is not None:
            self._questions.answer(asked.name, body)

    def reports(self) -> tuple[WorkerFailure, ...]:
        with self._lock:
            return self._reports

    def take(self) -> list[CoordinationEvent]:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            if isinstance(event, RoundReady):
                self._taken = event.generation
        return events

    def close(self, ending: str, if_last: str = "") -> None:
        if self._worker.is_alive():
            met = self._round is not NO_ROUND
            deadline = Deadline(LEAVE_PATIENCE if met else 0.1)
            asked = self._ask(lambda: self._leave(ending, if_last, deadline))
            self._requests.put(None)
            asked.join(deadline.remaining())
        self._stop.set()
        if self._questions is not None:
            self._questions.close()
        # Requests to serve a store that were not taken end when their connections close.
        with self._lock:
            self._events.clear()
        if self._reader is not None:
            self._reader.end()
        if self._rendezvous is not None:
            # If the supervisor has not heard of the last round, it has told the members nothing: to them this node is lost.
            heard = not self._joining and self._round.generation in {
                NO_ROUND.generation,
                self._taken,
            }
            self._rendezvous.shutdown(finished=heard)
        if self._worker.is_alive():
            self._worker.join(LEAVE_PATIENCE)  # its connection is closed, which ends its wait
        with self._lock:
            os.close(self._read)
            os.close(self._write)
            self._read = self._write = -1

    # -- called by the journal's thread -----------------------------------------------------------

    @property
    def plan(self) -> Mapping[str, Any]:
        assert self._rendezvous is not None
        return self._rendezvous.plan

    # -- the request thread -----------------------------------------------------------------

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            if request is None:
                return
            try:
                request()
            except RendezvousConnectionError as error:
                self._store_lost(error)
                if self._round is NO_ROUND:
                    self._post(CoordinationFailed(error))
                    return
                if self._broken:
                    return  # reported as the loss of the node that served the store
            except (RallyError, OSError, ValueError, KeyError) as error:
                wrapped = error if isinstance(error, RallyError) else RendezvousError(str(error))
                self._post(CoordinationFailed(wrapped))
                return
            except BaseException as error:  # a bug must not leave the supervisor waiting
                self._post(CoordinationFailed(RendezvousError(f"internal error: {error!r}")))
                raise

    def _ask(self, request: Callable[[], None]) -> threading.Thread:
        """Execute a request, even while the request thread waits for a round. Returns the thread that executes it."""
        if not self._joining or self._round is NO_ROUND:
            self._requests.put(request)
            return self._worker
        thread = threading.Thread(
            target=self._do_aside, args=(request,), name="rally-aside", daemon=True
        )
        thread.start()
        return thread

    def _do_aside(self, request: Callable[[], None]) -> None:
        try:
            self._aside.records = records = self._clone()
        except RallyError:
            return  # the store is gone; the waiting round notices
        try:
            request()
        except (RallyError, OSError, ValueError, KeyError):
            pass  # as above
        finally:
            records.close()

    def _meet(self, facts: NodeFacts) -> None:
        try:
            self._meet_others(facts)
        finally:
            self._joining = False

    def _meet_others(self, facts: NodeFacts) -> None:
        assert self._rendezvous is not None
        self._rendezvous.bring(
            {
                "workers": facts.num_workers,
                "addr": facts.store_addr,
                "port": facts.store_port,
                "restarts": facts.restarts,
                **({"ages": list(facts.ages)} if facts.ages else {}),
                "verdict": facts.verdict.value,
                **({} if facts.held is None else {"held": facts.held.to_json()}),
            }
        )
        try:
            formed = self._rendezvous.next_rendezvous()
        except RendezvousClosedError as closed:
            why = self._close_is_heard()
            if ENDED_WELL in {why, str(closed)}:
                self._post(NotNeeded())
                return
            if why == STOPPED and self._round is not NO_ROUND:
                # The node that was told to stop may have no time to tell the members of a round that has ended.
                self._post(PeerEvent("stopped", -1, self._round.generation))
                return
            raise
        except RendezvousGracefulExitError:
            self._post(NotNeeded())
            return
        except RendezvousConnectionError as error:
            # It looked for the store until join_timeout.
            self._post(CoordinationFailed(error))
            return
        ready = self._round_ready(formed)
        current = Round(formed.generation, formed.rank, formed.world_size)
        if self._questions is not None:
            self._questions.close()
        if self._reader is not None:
            self._reader.end()
        self._questions = NodeQuestions(current, self._clone)
        with self._lock:
            # The supervisor hears of the round before anything that happens in it: a member may leave at once, and the
            # store may be lost right here.
            self._round = current
            self._reports = ()
            self._put(ready)
        self._joining = False  # news that others are ahead are about this round from here on
        self._reader = JournalReader(self, current, self._clone(), self._lease)
        self._reader.start()

    def _close_is_heard(self) -> str:
        """Why there will be no further round. The node that serves the store waits until all have read this."""
        try:
            assert self._rendezvous is not None
            records = self._records()
            (closed,) = records.look(["closed"])
            if self._rendezvous.settle():
                records.write("closed/all_heard", {})
        except RallyError:
            return ""
        return "" if closed is None else str(closed.get("closed"))

    def _clone(self) -> RecordStore:
        assert self._rendezvous is not None
        records = self._rendezvous.records
        if records is None:
            raise RendezvousConnectionError("the connection to the job's store is closed")
        return records.clone()

    def _records(self) -> RecordStore:
        assert self._rendezvous is not None
        records = getattr(self._aside, "records", None) or self._rendezvous.records
        if records is None:
            raise RendezvousConnectionError("the connection to the job's store is closed")
        return records

    def _round_ready(self, formed: RendezvousInfo) -> RoundReady:
        assert self._rendezvous is not None
        plan = self._rendezvous.plan
        first = plan["first"]["facts"]
        kept = Kept.from_json(plan.get("kept"))
        addr = str(first.get("addr"))
        serving_host = self._rendezvous.store_host
        if addresses.is_loopback(addr) and serving_host is not None and formed.rank != 0:
            # Node 0 may call itself localhost (Kubeflow's master pod does).
            addr = serving_host
        if formed.rank == 0 and not addresses.exists(addr):
            addr = addresses.own_host()  # its own name need not resolve here
        return RoundReady(
            generation=formed.generation,
            node_rank=formed.rank,
            workers_of_nodes=tuple(
                int(count) for count, nodes in plan["workers"] for _ in range(int(nodes))
            ),
            master_addr=addr,
            master_port=int(first["port"]) if kept is None or not kept.port else kept.port,
            restarts=int(plan.get("restarts", 0)),
            ages=plans.ages_in(plan),
            serves=self._rendezvous.serves,
            replaced=0 if kept is None else kept.replaced,
            kept=kept,
            not_kept=plans.why_not_kept(plan),
            is_keeper=kept is not None and formed.rank in kept.keepers,
            network=self._network_for(addr),
            incident=self._incident(plan, formed.generation),
        )

    def _incident(self, plan: Mapping[str, Any], generation: int) -> str:
        """A name for the round that all its members know and that no other round of any job has."""
        made_by = plan.get("by") or self._config.rendezvous.run_id
        return hashlib.sha256(f"{made_by} {generation}".encode()).hexdigest()[:8]

    def _network_for(self, master_addr: str) -> Mapping[str, str]:
        """What workers are told about the network; the person at the terminal is told once."""
        choice = network.choice_for(environment.snapshot(), self._config.local_addr, master_addr)
        if choice.remark and choice.remark != self._network_remark:
            self._network_remark = choice.remark
            self._say(choice.remark)
        return choice.variables

    def _append(self, what: str, generation: int, **more: Any) -> None:
        """Append to the journal, unless the entry is about an earlier generation, whose journal nobody reads."""
        current = self._round
        if current is NO_ROUND or generation != current.generation or current.unheard:
            return
        entry = {"what": what, "node": current.rank, **more}
        Journal(self._records(), generation).append(entry)

    def _tell_failed(self, kind: str, generation: int, told: str) -> None:
        current = self._round
        if generation != current.generation or current.unheard:
            return
        if self._tally().take_turn_to_tell(kind):
            self._append("failed", generation, failures=told)

    def _count_told(self, generation: int) -> None:
        current = self._round
        if generation != current.generation or current.unheard:
            return
        if self._tally().note_told_to_stop():
            self._append("told", generation)

    def _say_farewell(self, generation: int, reason: str) -> None:
        assert self._rendezvous is not None
        current = self._round
        if current.kept_for == current.generation:
            if generation == current.generation:
                serves = self._rendezvous.serves
                self._append("leaving", generation, serves=serves, reason=reason)
                current.said_farewell = serves
            # Otherwise a round has formed meanwhile, and the supervisor says it again once it has heard of that.
            return
        # The others continue without this node, but use its store.
        entry = {"what": "leaving", "node": -1, "serves": self._rendezvous.serves}
        Journal(self._records(), current.kept_for).append(entry)

    def _stop_others(self, generation: int, more: Mapping[str, Any]) -> None:
        """The job was told to stop here, maybe while this node waits for the others to form ``generation``."""
        current = self._round
        # The others are in the same position only if they wait for the same round.
        if not current.unheard and not self._tally().take_turn_to_tell(f"stopped {generation}"):
            return
        self._append("stopped", min(generation, current.generation), **more)
        if generation > current.generation and not current.unheard:
            # Nodes that wait for that round read the entry above. Nodes that are already in it read this one.
            Journal(self._records(), generation).append({"what": "stopped", "node": -1, **more})

    def _count_done(self, generation: int) -> None:
        assert self._rendezvous is not None
        if self._tally().note_success():
            if self._config.elastic:
                self._rendezvous.close_rendezvous(ENDED_WELL)
            self._append("all_done", generation)
            return
        if self._config.elastic:
            self._merge_if_all_told()
            if self._rendezvous.serves:
                # If the others meet again, they need not wait for this node.
                self._rendezvous.leave(finished=True)
                self._round.keeps = True

    def _report(self, failures: str) -> None:
        """Publish this node's failures. The last node to do so merges all reports."""
        self._tally().note_report(failures)
        self._merge_if_all_told()

    def _merge_if_all_told(self) -> None:
        counted = self._tally()
        if counted.is_all_told():
            counted.merge_reports(None if self._reader is None else self._reader.first_failure)
            self._append("reports", self._round.generation)

    def _tally(self) -> Tally:
        return Tally(self._records(), self._round, elastic=self._config.elastic)

    def _leave(self, ending: str, if_last: str, deadline: Deadline) -> None:
        """Tell the others that this node leaves; close the rendezvous and clear the store if it is the last."""
        current, rendezvous = self._round, self._rendezvous
        assert rendezvous is not None
        ending = self._ending or ending
        try:
            if ending:
                rendezvous.close_rendezvous(ending)
            if current is NO_ROUND:
                return
            records = self._records()
            kept_for = current.kept_for
            if kept_for == current.generation:
                left = records.increment(f"{kept_for}/left")
                if left + len(current.gone) >= current.num_nodes:
                    records.write(f"{kept_for}/all_left", {})
                    if (ending or if_last) and not rendezvous.serves:
                        rendezvous.close_rendezvous(ending or if_last)
                        rendezvous.await_settled(records)
                        rendezvous.clear(well=(ending or if_last) == ENDED_WELL)
            if rendezvous.serves and ending:
                records.wait(f"{kept_for}/all_left", deadline.remaining() or 0.0)
                rendezvous.await_settled(records)
            elif current.said_farewell:
                self._await_those_who_hear(records, current)
        except RallyError:
            pass  # the others are already gone

    def _await_those_who_hear(self, records: RecordStore, current: Round) -> None:
        """Wait until the others have read that the store goes away. A node that has not would take this one for lost."""
        deadline = Deadline(FAREWELL_PATIENCE)
        for rank in range(current.num_nodes):
            if rank != current.rank and rank not in current.gone:
                records.wait(_heard(current.generation, rank), deadline.remaining() or 0.0)

    # -- what happens on other nodes -----------------------------------------------------------------

    def _heed_loss(self, loss: Loss) -> None:
        """The neighbour is gone. Called in the pulse's thread."""
        # Not the current round's generation: another round may have just formed, or this one may not be known here yet.
        generation = loss.neighbour.generation
        if loss.left:
            # It announced its departure, or had finished.
            self._requests.put(lambda: self._note_left(generation, loss))
            return
        rank, reason, certain = loss.neighbour.rank, loss.reason, loss.certain
        host = loss.neighbour.host
        self._requests.put(
            lambda: self._append(
                "lost", generation, about=rank, reason=reason, certain=certain, host=host
            )
        )

    def _note_left(self, generation: int, loss: Loss) -> None:
        assert self._rendezvous is not None
        if generation == self._round.generation:
            self._rendezvous.note_gone(generation, loss.neighbour.rank, certain=True)

    def _heed_waiting(self, _count: int) -> None:
        self._post(PeerEvent("asks for admission", -1, self._round.generation))

    def _heed_left_out(self) -> None:
        self._post(PeerEvent("left out", -1, self._round.generation))

    def _heed_store_lost(self, error: RendezvousConnectionError) -> None:
        self._store_lost(error)

    def _store_lost(self, error: RendezvousConnectionError) -> None:
        """This generation cannot continue, because nodes cannot communicate. An elastic job may form another one."""
        with self._lock:
            current = self._round
            known, current.store_lost = current.store_lost, True
            current.unheard = True
        if known or current is NO_ROUND or self._stop.is_set():
            return
        host = self._rendezvous.store_host if self._rendezvous is not None else None
        reason = f"the node that serves the job's store ({host}) is lost"
        if host is None:  # no node serves it
            reason = f"the job's store cannot be used: {error}"
        if not self._config.elastic:
            reason = f"node 0 is lost: {error}"
            self._broken = True
        named = self._name_of_store_host()
        self._post(PeerEvent("lost", 0, current.generation, reason=reason, host=named))
        self._post(PeerEvent("reports", 0, current.generation))  # no node can report any more
        if self._config.elastic:
            self._requests.put(lambda: self._find_store(current))

    def _name_of_store_host(self) -> str:
        """What the host that serves the job's store calls itself; empty if that is not known."""
        if self._rendezvous is None or self._rendezvous.store_host is None:
            return ""
        plan = self._rendezvous.plan
        first = plans.first(plan)
        serves = not self._config.elastic or plan.get("store") == first.get("id")
        return str(first.get("host", "")) if serves else ""

    def _find_store(self, current: Round) -> None:
        assert self._rendezvous is not None
        if self._round is not current:
            return  # the nodes have met again meanwhile, at the store's new place
        self._rendezvous.find_store()
        current.unheard = False
        # If only this node had lost the store, the others must be told to form the next round with it.
        self._append("parted", current.generation)

    def heed(self, current: Round, entry: Mapping[str, Any]) -> None:
        """Handle an entry of the journal. Called in the reader's thread."""
        what, node = str(entry.get("what")), entry.get("node")
        node = node if isinstance(node, int) else -1
        own = node == current.rank
        generation = current.generation
        match what:
            case "all_done":
                self._post(PeerEvent("all_done", node, generation))
            case "reports":
                self._take_reports(current)
                self._post(PeerEvent("reports", node, generation))
            case "lost":
                self._heed_lost(current, entry)
            case "standstill":
                progress = step_tables.from_json(entry.get("progress"))
                meeting = entry.get("meeting")
                if isinstance(meeting, int):
                    self._post(
                        PeerEvent(what, node, generation, progress=progress, meeting=meeting)
                    )
            case "waiting" | "in session" | "out of session" | "not kept" | "told":
                self._post(PeerEvent(what, node, generation))
            case "worker lost":
                failures = failures_from_json(str(entry.get("failures", "[]")))
                survivors = entry.get("survivors") is True
                if failures:
                    self._post(PeerEvent(what, node, generation, failures, survivors=survivors))
            case "asked":
                name, question = entry.get("name"), entry.get("question")
                if own:
                    if self._questions is not None:
                        self._questions.note_read(str(name))
                elif isinstance(name, str) and isinstance(question, dict):
                    asked = entry.get("nodes")
                    if isinstance(asked, list) and current.rank not in asked:
                        return
                    self._post(NodeAsked(node, generation, name, question))
            case "parted" if not own:
                reason = f"node {node} has lost its connection to the job's store"
                self._post(PeerEvent("lost", node, generation, reason=reason))
            case "leaving" if not own:
                assert self._rendezvous is not None
                self._rendezvous.note_gone(generation, node, certain=True)
                current.gone.add(node)
                if entry.get("serves") is True:
                    # Its store ends with it, so the next round meets elsewhere.
                    current.store_lost = True
                    self._requests.put(self._rendezvous.abandon_store)
                reason = str(entry.get("reason", ""))[:MAX_REASON]
                self._post(PeerEvent("leaving", node, generation, reason=reason))
                if current.store_lost:
                    self._mark_as_heard(current)
            case "failed" | "hangs" | "stopped" if not own:
                failures = failures_from_json(str(entry.get("failures", "[]")))
                reason = str(entry.get("reason", ""))[:MAX_REASON]
                self._post(PeerEvent(what, node, generation, failures, reason))

    def _mark_as_heard(self, current: Round) -> None:
        """The node that serves the store waits for this mark before it exits."""
        if self._reader is not None:
            self._reader.mark(_heard(current.generation, current.rank))

    def _heed_lost(self, current: Round, entry: Mapping[str, Any]) -> None:
        assert self._rendezvous is not None
        about = entry.get("about")
        if not isinstance(about, int):
            return
        reason = str(entry.get("reason"))
        if about == current.rank:
            reason = (
                f"the other nodes gave this one up as lost ({reason}): it was suspended or cut off"
            )
        else:
            certain = entry.get("certain") is True
            self._rendezvous.note_gone(current.generation, about, certain=certain)
            current.gone.add(about)
        is_own = about == current.rank
        host = str(entry.get("host", ""))[:MAX_REASON]
        self._post(
            PeerEvent("lost", about, current.generation, reason=reason, is_own=is_own, host=host)
        )
        if current.reported:
            self._requests.put(self._merge_if_all_told)

    def _take_reports(self, current: Round) -> None:
        reader = self._reader
        body = None if reader is None else reader.look(tally.merged_key(current.generation))
        if body is not None:
            with self._lock:
                self._reports = failures_from_json(body["failures"])

    def heed_next_round(self, current: Round) -> None:
        """Other nodes are already in the next round, though no entry said so. Called in the reader's thread."""
        if self._config.elastic and not self._joining:
            reason = "the others have begun the next round"
            self._post(PeerEvent("lost", -1, current.generation, reason=reason))

    def heed_closed(self, current: Round, reason: str) -> None:
        """No entry said why the job was closed. Called in the reader's thread."""
        if reason == ENDED_WELL:
            self._post(PeerEvent("all_done", -1, current.generation))
        elif not self._joining:
            told = f"the job was closed: {reason[:MAX_REASON]}"
            self._post(PeerEvent("lost", -1, current.generation, reason=told))

    def heed_as_keeper(self, current: Round, entry: Mapping[str, Any]) -> None:
        """Handle an entry of a later round that this node is not part of. Called in the reader's thread."""
        what, node = str(entry.get("what")), entry.get("node")
        if what in {"all_done", "stopped"}:
            rank = node if isinstance(node, int) else -1
            self._post(PeerEvent(what, rank, current.generation))

    def nobody_is_left(self, current: Round) -> None:
        """The members for whom this node kept the store are gone without success. Called in the reader's thread."""
        self._ending = "all other nodes are gone"
        self._post(PeerEvent("all_done", -1, current.generation))

    def reader_lost(self, current: Round, error: RendezvousConnectionError) -> None:
        if current is self._round:
            self._store_lost(error)

    # -- events ---------------------------------------------------------------------------------

    def _post(self, event: CoordinationEvent) -> None:
        with self._lock:
            self._put(event)

    def _put(self, event: CoordinationEvent) -> None:
        """As :meth:`_post`, with the lock held."""
        if self._stop.is_set():
            return
        self._events.append(event)
        if self._write >= 0:
            try:
                os.write(self._write, b"x")
            except BlockingIOError:
                pass  # the pipe is readable already


def _heard(generation: int, rank: int) -> str:
    """The key of the mark by which a node says it has read that the store goes away."""
    return f"{generation}/heard/{rank}"
