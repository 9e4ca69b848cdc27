"""One member of a group: its parts, how it starts and how it closes.

The :class:`Caller` makes calls over :class:`Connections`, which the :class:`Dialer` opens. The :class:`Acceptor` accepts
connections from other workers, and the :class:`Service` runs their requests on the :class:`ThreadPool`. The
:class:`PeerMonitor` tells all parts when a peer is gone.

No part knows the agent: each declares what it needs from the others, as arguments or as protocols (``ports``).
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from typing import Any, ClassVar

import torch

from rallypoint import events
from rallypoint._core import call_counts, forks
from rallypoint._core.clock import Deadline
from rallypoint.rpc import interruptions
from rallypoint.rpc.autograd.contexts import Contexts
from rallypoint.rpc.autograd.served import enrol, release
from rallypoint.rpc.certificates import identity_of
from rallypoint.rpc.connections.acceptor import Acceptor, Site
from rallypoint.rpc.connections.connections import Connections
from rallypoint.rpc.connections.dialer import Dialer
from rallypoint.rpc.connections.incoming import Incoming
from rallypoint.rpc.connections.lines import Lines
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.current_call import SERVING
from rallypoint.rpc.current_context import CURRENT
from rallypoint.rpc.groups.dynamic_group import DynamicGroup
from rallypoint.rpc.groups.roster import Group, Roster
from rallypoint.rpc.options import NativeRpcBackendOptions
from rallypoint.rpc.references.rref import call_remote
from rallypoint.rpc.references.rref_table import RRefTable
from rallypoint.rpc.serialization.allowlist import AllowList
from rallypoint.rpc.threads.poller import Poller
from rallypoint.rpc.threads.task_queue import TaskQueue
from rallypoint.rpc.threads.thread_pool import Job, ThreadPool, waiting
from rallypoint.rpc.trust import Trust
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.tracing import switch
from rallypoint.wire import transports
from rallypoint.wire.transport import Address, Way

from .caller import Caller
from .count_reports import CountReports
from .counters import BOUNDS, Counters, Tally
from .devices import PeerDevices, PeerPickler
from .diagnostics import Diagnostics
from .peer_monitor import PeerMonitor
from .replies import Replies
from .service import Service
from .traced_caller import TracedCaller


logger = logging.getLogger(__name__)

# Seconds for threads and peers to finish when an agent closes.
_LAST_WORDS = 0.5
# Bits in the number of a value or reference. The bits above them are the term of the worker that created it.
_NUMBER_BITS = 32


def _settle_torch() -> None:
    """Have torch initialize its CPU dispatch and thread count before the agent starts threads.

    The first operation in a process does so under a lock. A child forked at that moment inherits the lock, which is never
    released there, and hangs in its own first operation.
    """
    torch.get_num_threads()
    torch.zeros(1, device="cpu").add_(1)


def _allowed(options: NativeRpcBackendOptions, name: str) -> AllowList | None:
    rebuilt, called, exported = (
        options.allowed_modules,
        options.allowed_calls,
        options.exported_only,
    )
    if rebuilt is None and called is None and not exported:
        return None
    return AllowList(rebuilt or (), called, exported=exported, worker=name)


class Agent:
    """A member of an RPC group.

    Args:
        name: this worker's name.
        options: its options.
        trust: the group's secret, and the settings that all members share.
    """

    caller_type: ClassVar[type[Caller]] = Caller

    def __init__(
        self,
        name: str,
        options: NativeRpcBackendOptions,
        trust: Trust,
    ) -> None:
        self.options = options
        self.counters = Counters()
        # Calls by the program, not counting the package's own.
        self.made, self.done = Tally(), Tally()
        self.allowed = _allowed(options, name)
        self.rrefs: RRefTable = None  # type: ignore[assignment]  # set by enter(), before anything is served
        self.contexts: Contexts = None  # type: ignore[assignment]  # the same
        self.group: Group | None = None
        self._secret = trust.secret
        self._gil_profiling = False
        # Whether this process is a forked child of the worker.
        self.is_inherited = False
        identity = identity_of(options.tls)
        ways = [
            Way(each, tls=identity is not None and not each.private)
            for each in map(transports.find, options.transports)
        ]

        self._poller = Poller(self._on_wake)
        self._pool = pool = ThreadPool(
            f"rpc-{name}", options.num_worker_threads, self._poller, self._due, self._tick
        )
        self.tasks = TaskQueue(pool, self._poller)
        self.roster = roster = Roster(name, trust.job)
        self.lines = Lines(options.shared_memory_bytes, options.heartbeat, self.tasks.later)
        devices = PeerDevices(options, roster)
        self.service = service = Service(
            roster.me,
            pool,
            PeerPickler(options, devices),
            self.allowed,
            self.counters,
            self.done,
        )
        self.dialer = Dialer(
            roster, self.lines, trust.secret, trust.seals, ways, identity, options.heartbeat
        )
        replies = Replies(self.allowed)
        self.connections = connections = Connections(
            self.dialer,
            roster,
            self._poller,
            pool,
            most_unread=options.in_flight_bytes,
            heartbeat=options.heartbeat,
            job=service.new_job,
            read=replies.read,
            suspect=self._suspect,
            inquire=lambda to, forks: self.rrefs.inquire(to, forks),
        )
        self.acceptor = Acceptor(
            connections,
            self._poller,
            pool,
            roster,
            self.lines,
            trust.secret,
            trust.seals,
            ways,
            identity,
            self.tasks.later,
        )
        self.monitor = PeerMonitor(roster, connections, self.dialer, self.tasks)
        is_traced = self.caller_type is Caller and switch.is_enabled()
        caller_type = TracedCaller if is_traced else self.caller_type
        self.caller = caller = caller_type(
            options, connections, replies, devices, pool, self.tasks, self.counters, self.made
        )
        self.diagnostics = diagnostics = Diagnostics(
            connections, pool, service.loop, options.num_worker_threads
        )

        self.reports = CountReports(self.tasks, self._counts)
        self.me = roster.me
        self.incarnation = roster.incarnation
        self.skipped = self.acceptor.skipped
        self.long_ones = service.long_ones
        # The agent's interface, bound to the parts directly: wrapper methods would cost time in each call.
        self.find = roster.find
        self.info = roster.info
        self.infos = roster.infos
        self.is_gone = roster.is_gone
        self.route = connections.route
        self.watch = connections.watch
        self.is_connected_to = connections.is_connected_to
        self.call_sync = caller.call_sync
        self.begin_call = caller.begin
        self.finish_call = caller.finish
        self.call_async = caller.call_async
        self.call_stream = caller.call_stream
        self.deadline = caller.deadline
        self.decode = replies.decode
        self.remote = functools.partial(call_remote, self)
        self.waiting = waiting
        self.is_idle = diagnostics.is_idle
        self.wait_idle = diagnostics.wait_idle
        self.work = diagnostics.work
        self.debug_info = diagnostics.debug_info
        self.peers = diagnostics.peers
        self.queue = diagnostics.queue
        forks.abandon_in_child(self)

    # -- coming and going ---------------------------------------------------------------------------

    def listen(self, site: Site) -> dict[str, Address]:
        """Open the listeners; nothing is served yet. As :meth:`Acceptor.open`."""
        return self.acceptor.open(self.options, site)

    def enter(self, group: Group) -> None:
        """Become a member of ``group``."""
        self.group = group
        self.roster.enter(group)
        self.me = self.roster.me
        self.rrefs = rrefs = RRefTable(
            self.me.id,
            first=group.term << _NUMBER_BITS,
            calls=self.caller,
            peers=self.roster,
            links=self.connections,
            tasks=self.tasks,
        )
        self.caller.rrefs = self.monitor.rrefs = rrefs
        self.contexts = self.monitor.contexts = contexts = Contexts(
            self.me.id,
            term=group.term,
            calls=self.caller,
            peers=self.roster,
            tasks=self.tasks,
            enrol=enrol,
            release=release,
        )
        self.service.enter(self.me, rrefs, contexts)

    def start(self) -> None:
        """Serve requests, including those that have arrived since :meth:`listen`."""
        _settle_torch()
        interruptions.begin()
        self.acceptor.start()
        self._pool.start()
        if isinstance(self.group, DynamicGroup):
            self.group.on_join(self.monitor.came)
            self.group.on_leave(self.monitor.left)
        self.reports.start()
        events.emit(events.AgentStarted(worker=self.me.name, id=self.me.id))

    def close(self, timeout: float = 5.0) -> None:
        """Leave: fail all calls, stop all threads, release all resources. Idempotent.

        Functions that are still running cannot be interrupted; their results are dropped.
        """
        self.reports.close()
        connections = self.connections
        left = connections.stop()
        if left is None:
            return
        outgoing, incoming = left
        self.connections.idle.close()
        self.dialer.stop()
        strangers = self.acceptor.close()
        for each in outgoing:
            each.fail("this worker has left the group")
        # Answers that are ready go out first.
        self._pool.close(min(_LAST_WORDS, timeout))
        connections.be_alone()
        last_words = Deadline(min(_LAST_WORDS, timeout))
        for peer in incoming:
            peer.finish(last_words)
        self.service.loop.close(timeout)
        ended = self._pool.close(timeout)
        connections.complete_left()
        for stranger in strangers:
            stranger.close("this worker has left the group")
        for each in outgoing:
            each.close()
        for peer in incoming:
            peer.close()
        connections.close_all_ended()
        if self.group is not None:
            self.group.close()
            self.rrefs.close()
            self.contexts.close()
        self.tasks.close()
        self.lines.close()
        events.emit(events.AgentStopped(worker=self.me.name))
        interruptions.end()
        if ended:
            self._poller.close()
        else:
            logger.warning(
                "%s has left the group while it still serves calls; their results are dropped",
                self.me.name,
            )

    def abandon(self) -> None:
        """In a forked child, which is not a worker: leave the parent's resources alone."""
        self.is_inherited = True
        interruptions.abandon()
        self._poller.abandon()
        self._pool.abandon()
        self.connections.abandon()
        if self.group is not None:
            self.group.abandon()
            self.rrefs.abandon()
        SERVING.set(None)
        CURRENT.set(None)

    @property
    def is_closed(self) -> bool:
        return self.connections.is_closed

    def _suspect(self, info: WorkerInfo, reason: str, ended: Outgoing | Incoming | None) -> None:
        self.monitor.suspect(info, reason, ended)

    # -- called by the pool -------------------------------------------------------------------------

    def _on_wake(self, jobs: deque[Job]) -> None:
        self.tasks.take(jobs)

    def _tick(self) -> None:
        self.connections.tick()

    def _due(self, now: float) -> float | None:
        """Run due tasks and apply timeouts. Returns when to call this again."""
        found = (
            self.tasks.due(now),
            self.connections.expire(now),
            self.connections.look_at_hosts(now),
            self.acceptor.expire(now),
        )
        return min((each for each in found if each is not None), default=None)

    def _counts(self) -> dict[str, Any]:
        counters = self.counters
        return {
            "made": counters.sent,
            "served": counters.served,
            "failed": counters.failed,
            **self.diagnostics.numbers(),
            call_counts.LATENCIES: counters.latencies,
            call_counts.BOUNDS: BOUNDS,
        }

    # -- timeouts, and torch's names ----------------------------------------------------------------

    @property
    def default_timeout(self) -> float:
        """The timeout of calls that specify none."""
        return self.caller.default_timeout

    @default_timeout.setter
    def default_timeout(self, seconds: float) -> None:
        self.caller.default_timeout = seconds

    def get_debug_info(self) -> dict[str, str]:
        info = self.debug_info()
        if self._gil_profiling:
            info["agent.gil_average_wait_time_us"] = "0"
        return info

    def enable_gil_profiling(self, flag: bool) -> None:
        self._gil_profiling = flag

    def _get_device_map(self, to: WorkerInfo) -> dict[torch.device, torch.device]:
        """For torch's RemoteModule."""
        return {
            torch.device(str(here)): torch.device(str(there))
            for here, there in self.options.device_maps.get(to.name, {}).items()
        }

    def get_worker_infos(self) -> list[WorkerInfo]:
        return self.infos()

    def get_worker_info(self, name: str | int | None = None) -> WorkerInfo:
        return self.info(name)
