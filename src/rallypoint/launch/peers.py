"""Several nodes: this supervisor's line to the others.

Theory of operation
-------------------
The nodes meet in a rendezvous (fixed membership) and then share a *log* in the same store: numbered
entries that are written once and read by all in the same order. So every node sees the same first
failure, the same number of nodes done, and comes to the same decision by itself.

An entry takes the first free number by an atomic put-if-absent, so the log has no holes, whoever dies
while writing. Each reader waits for the next number in one blocking wait.

Two threads, each with a connection of its own, so that a blocked wait never delays a heartbeat: one
carries out requests (join, tell) and in between moves this node's heartbeat counter; the other
follows the log. The leader watches everybody's counter (:mod:`rallypoint.rendezvous.lease`); that the
leader itself is gone shows as a broken connection. Clocks of two hosts are never compared.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import uuid
from collections.abc import Callable
from typing import Any

from rallypoint._core import addresses
from rallypoint._core.clock import MONOTONIC, Deadline
from rallypoint.errors import ConfigError, RallyError, RendezvousConnectionError, RendezvousError
from rallypoint.rendezvous.api import RendezvousInfo
from rallypoint.rendezvous.lease import Leases
from rallypoint.rendezvous.static import StaticRendezvous
from rallypoint.rendezvous.store import Store

from .config import LaunchConfig
from .coordination import (
    Coordination,
    CoordinationEvent,
    CoordinationFailed,
    LoneNode,
    PeerEvent,
    RoundReady,
)
from .output.failure import WorkerFailure, failures_from_json, failures_to_json


# Heartbeats in one lease: a few may be late.
BEATS_PER_LEASE = 5
# One blocking wait of the log's reader; a longer silence is no news, and it waits again.
LONG_WAIT = 24 * 3600.0
# How long leaving may take: for the leader, until the others have read the last entries.
LEAVE_PATIENCE = 5.0
# Failures in one entry are cut to this many: a root cause is not the hundredth.
MAX_FAILURES_TOLD = 64

Say = Callable[[str], None]


def coordination_for(config: LaunchConfig, say: Say) -> Coordination:
    """The line to the other nodes; with one node, nobody's."""
    return LoneNode() if config.num_nodes == 1 else PeerNodes(config, say)


class PeerNodes:
    """Implements :class:`~rallypoint.launch.coordination.Coordination` for several nodes.

    Args:
        config: of this node.
        say: prints a line for the person at the terminal.
    """

    def __init__(self, config: LaunchConfig, say: Say) -> None:
        self._config = config
        self._say = say
        self._node_id = uuid.uuid4().hex
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._events: list[CoordinationEvent] = []
        self._reports: dict[int, tuple[WorkerFailure, ...]] = {}  # in the order of the log
        self._changed = threading.Condition(self._lock)
        self._done: set[int] = set()
        self._lost: set[int] = set()
        self._left: set[int] = set()
        self._generation = 0
        self._node_rank = -1
        self._broken = False
        self._next_entry = 0
        self._stop = threading.Event()
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listener: socket.socket | None = None
        self._store: Store | None = None
        self._handler: StaticRendezvous | None = None
        self._leader = False
        self._leases: Leases[int] = Leases(config.rendezvous.heartbeat_timeout)
        self._worker = threading.Thread(target=self._work, name="rally-peers", daemon=True)
        self._reader: threading.Thread | None = None

    # -- what the supervisor asks ---------------------------------------------------------------

    @property
    def serves_store(self) -> bool | None:
        rank = self._config.rendezvous.node_rank
        return None if rank is None else rank == 0

    @property
    def broken(self) -> bool:
        return self._broken

    def fileno(self) -> int:
        return self._read

    def join(self, generation: int, num_workers: int, store_addr: str, store_port: int) -> None:
        facts = {"workers": num_workers, "addr": store_addr, "port": store_port}
        if not self._worker.is_alive():
            self._listener = self._listen()  # a port that is in use must be known at once
            self._worker.start()
        self._requests.put(lambda: self._meet(generation, facts))

    def tell(self, what: str, generation: int, failures: tuple[WorkerFailure, ...]) -> None:
        text = failures_to_json(failures[:MAX_FAILURES_TOLD])
        self._requests.put(lambda: self._append(what, generation, text))

    def reports(self) -> tuple[WorkerFailure, ...]:
        with self._lock:
            return tuple(failure for part in self._reports.values() for failure in part)

    def take(self) -> list[CoordinationEvent]:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        if self._worker.is_alive():
            self._stop.set()
            if self._node_rank >= 0:
                self._requests.put(lambda: self._append("left", self._generation, "[]"))
            self._requests.put(None)
            # A thread that still waits for a round to form cannot be interrupted; it is a daemon.
            deadline = Deadline(LEAVE_PATIENCE if self._node_rank >= 0 else 0.1)
            if self._leader and self._node_rank >= 0:
                with self._changed:
                    while not self._all_have(self._left) and not self._broken:
                        if not self._changed.wait(deadline.remaining()):
                            break
            self._worker.join(deadline.remaining())
            if self._reader is not None:
                self._reader.join(deadline.remaining())
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            os.close(self._read)
            os.close(self._write)
            self._read = self._write = -1

    def _all_have(self, nodes: set[int]) -> bool:
        return len(nodes | self._lost) >= self._config.num_nodes

    # -- the thread of requests -----------------------------------------------------------------

    def _listen(self) -> socket.socket | None:
        """The control store's socket, if this node is the one to serve it.

        Raises:
            ConfigError: this node must serve it and the port is in use.
        """
        meeting = self._config.rendezvous
        if meeting.node_rank not in {0, None}:
            return None
        if not addresses.is_this_host(meeting.host):
            if meeting.node_rank is None:
                return None
            # An address that is only a NAT's outside, say: node 0 serves, whatever its name here.
            self._say(f"{meeting.host} is no address of this machine; serving on all of them")
        try:
            return addresses.bind_store(None, meeting.port)
        except ConfigError:
            if meeting.node_rank is None:
                return None  # another supervisor on this machine was first
            raise

    def _work(self) -> None:
        pause = self._config.rendezvous.heartbeat_timeout / BEATS_PER_LEASE
        while True:
            try:
                request = self._requests.get(timeout=pause)
            except queue.Empty:
                request = self._beat
            if request is None:
                return
            try:
                request()
            except RendezvousConnectionError as error:
                self._store_lost(error)
                if self._node_rank < 0:  # lost before the first round: nobody to report to
                    self._post(CoordinationFailed(error))
                    return
            except (RallyError, OSError, ValueError, KeyError) as error:
                wrapped = error if isinstance(error, RallyError) else RendezvousError(str(error))
                self._post(CoordinationFailed(wrapped))
                return

    def _connect(self) -> StaticRendezvous:
        from rallypoint.rendezvous.backends.tcpstore import TcpStore, wait_until_reachable

        meeting = self._config.rendezvous
        listener, self._listener = self._listener, None
        self._leader = listener is not None
        if listener is None:
            deadline = Deadline(meeting.join_timeout)
            wait_until_reachable(meeting.host, meeting.port, deadline, self._stop, self._say)
        self._store = TcpStore(
            meeting.host.strip("[]"), meeting.port, listener, meeting.heartbeat_timeout
        )
        return StaticRendezvous(
            self._store,
            leader=self._leader,
            run_id=meeting.run_id,
            num_nodes=self._config.num_nodes,
            node_rank=meeting.node_rank,
            host=addresses.hostname(),
            node_id=self._node_id,
            join_timeout=meeting.join_timeout,
            say=self._say,
        )

    def _meet(self, generation: int, facts: dict[str, Any]) -> None:
        if self._handler is None:
            self._handler = self._connect()
        with self._lock:
            self._generation = generation
            self._reports.clear()
            self._done.clear()
        self._handler.bring(generation, facts)
        round_ = self._handler.next_rendezvous()
        self._node_rank = round_.rank
        # Nobody's counter moved while all were waiting for each other: leases start anew.
        self._leases = Leases(self._config.rendezvous.heartbeat_timeout)
        if self._reader is None:
            assert self._store is not None
            store = self._store.clone()
            self._reader = threading.Thread(
                target=self._follow_log, args=(store,), name="rally-peers-log", daemon=True
            )
            self._reader.start()
        self._post(self._round_ready(round_))

    def _round_ready(self, round_: RendezvousInfo) -> RoundReady:
        first = round_.members[0].facts
        addr = str(first["addr"])
        if addresses.is_loopback(addr) and not self._leader:
            # What node 0 calls itself (Kubeflow's master pod: localhost) may mean another host here.
            addr = self._config.rendezvous.host
        return RoundReady(
            generation=round_.generation,
            node_rank=round_.rank,
            workers_of_nodes=tuple(int(member.facts["workers"]) for member in round_.members),
            master_addr=addr,
            master_port=int(first["port"]),
        )

    def _append(self, what: str, generation: int, failures: str, node: int | None = None) -> None:
        """Write an entry at the end of the log: about this node, or (``lost``) about another."""
        if self._store is None:
            return
        about = self._node_rank if node is None else node
        entry = {"what": what, "node": about, "generation": generation, "failures": failures}
        # The id makes it ours: an equal entry of another writer must not pass for it.
        data = json.dumps({**entry, "id": uuid.uuid4().hex}).encode()
        number = self._next_entry
        while self._store.put_new(self._entry_key(number), data) != data:
            number += 1

    def _entry_key(self, number: int) -> str:
        return f"rally/{self._config.rendezvous.run_id}/log/{number}"

    def _beat(self) -> None:
        if self._store is None or self._node_rank < 0:
            return
        key = f"rally/{self._config.rendezvous.run_id}/beat/"
        self._store.add(f"{key}{self._node_rank}", 1)
        if not self._leader:
            return
        gone = self._left | self._lost
        others = [
            n for n in range(self._config.num_nodes) if n != self._node_rank and n not in gone
        ]
        counters = {node: self._store.add(f"{key}{node}", 0) for node in others}
        for node in self._leases.observe(MONOTONIC.now(), counters):
            self._append("lost", self._generation, "[]", node)

    # -- the thread that follows the log --------------------------------------------------------

    def _follow_log(self, store: Store) -> None:
        while True:
            try:
                data = store.get(self._entry_key(self._next_entry), LONG_WAIT)
            except TimeoutError:
                continue
            except RendezvousConnectionError as error:
                self._store_lost(error)
                return
            self._next_entry += 1
            if self._heed(json.loads(data)):
                return

    def _heed(self, entry: dict[str, Any]) -> bool:
        """Take one entry in. True if it is our own leave: the last one for us."""
        what, node, generation = entry["what"], entry["node"], entry["generation"]
        own = node == self._node_rank
        event: PeerEvent | None = None
        with self._changed:
            if what == "done" and generation == self._generation:
                self._done.add(node)
                if len(self._done) >= self._config.num_nodes:
                    event = PeerEvent("all_done", node, generation)
            elif what == "report" and generation == self._generation:
                self._reports[node] = failures_from_json(entry["failures"])
                if self._all_have(set(self._reports)):
                    event = PeerEvent("reports", node, generation)
            elif what == "left":
                self._left.add(node)
            elif what == "lost":
                self._lost.add(node)
                seconds = self._config.rendezvous.heartbeat_timeout
                reason = f"node {node} is lost: not heard of for {seconds:g} s"
                event = PeerEvent("lost", node, generation, reason=reason)
                if self._reports and self._all_have(set(self._reports)):
                    self._post_locked(PeerEvent("reports", node, generation))
            elif what in {"failed", "stopped"} and not own:
                event = PeerEvent(what, node, generation, failures_from_json(entry["failures"]))
            self._changed.notify_all()
        if event is not None:
            self._post(event)
        return bool(what == "left" and own)

    # -- events ---------------------------------------------------------------------------------

    def _store_lost(self, error: RendezvousConnectionError) -> None:
        with self._changed:
            already, self._broken = self._broken, True
            self._changed.notify_all()
        if not already and not self._stop.is_set() and self._node_rank >= 0:
            reason = f"node 0 is lost: {error}"
            self._post(PeerEvent("lost", 0, self._generation, reason=reason))
            self._post(PeerEvent("reports", 0, self._generation))  # nobody can report any more

    def _post(self, event: CoordinationEvent) -> None:
        with self._lock:
            self._post_locked(event)

    def _post_locked(self, event: CoordinationEvent) -> None:
        self._events.append(event)
        if self._write >= 0:
            try:
                os.write(self._write, b"x")
            except BlockingIOError:
                pass  # it is readable already
