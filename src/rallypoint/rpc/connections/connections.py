"""The connections of one worker, outgoing and incoming, and which thread reads them.

``dialer`` opens and ``acceptor`` accepts them; ``peer_monitor`` decides what the end of one means.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import Expelled, PeerLost, RpcTimeout
from rallypoint.rpc.groups.member import Member
from rallypoint.rpc.groups.roster import Roster
from rallypoint.rpc.references.ids import Fork
from rallypoint.rpc.threads.poller import READ, WRITE, Poller
from rallypoint.rpc.threads.task_queue import Task
from rallypoint.rpc.threads.thread_pool import Job, ThreadPool, waiting
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.wire.frames import Frame
from rallypoint.wire.line import Line
from rallypoint.wire.sharing import Sharing
from rallypoint.wire.silence import LOOKS

from .calls import Call
from .completions import Completion, Completions, complete_soon
from .dialer import Dialer, is_late
from .idle import IdleCondition
from .incoming import Incoming
from .outgoing import Outgoing


logger = logging.getLogger(__name__)

# Seconds for one attempt to connect; the call may allow more.
_CONNECT_SECONDS = 10.0
# Seconds to wait for the last answers of a worker that is gone: the network may lose a packet and send it again.
_LAST_ANSWERS = 1.0
_LEFT = "this worker has left the group"
_HANG_UP = select.EPOLLRDHUP


class Connections:
    """The connections of one agent, in both directions.

    Args:
        dialer: opens outgoing connections.
        roster: the members that can be called.
        most_unread: bytes of answers that a peer may leave unread.
        heartbeat: seconds after which a silent host is lost.
        job: turns a request into a job for the pool.
        read: reads the content of a reply.
        suspect: called with a peer, a reason, and its connection if that has ended (to be closed with
            :meth:`close_ended`), or None if its address refuses connections.
        inquire: asks a worker which of these references it has received.
    """

    def __init__(
        self,
        dialer: Dialer,
        roster: Roster,
        poller: Poller,
        pool: ThreadPool,
        *,
        most_unread: int,
        heartbeat: float,
        job: Callable[[Incoming, Frame], Job],
        read: Callable[[Frame, Outgoing], Any],
        suspect: Callable[[WorkerInfo, str, Outgoing | Incoming | None], None],
        inquire: Callable[[int, Sequence[Fork]], None],
    ) -> None:
        self._dialer = dialer
        self._roster = roster
        self._poller = poller
        self._pool = pool
        self._most_unread = most_unread
        self._heartbeat = heartbeat
        # When hosts are checked next; None: there is no connection to another host.
        self._look_at: float | None = None
        self._job = job
        self._read = read
        self._suspect = suspect
        self._inquire = inquire
        # Connections with frames that are held back to be sent together.
        self._kept: deque[Outgoing] = deque()
        self._lock = threading.Lock()
        # Under the lock:
        self._routes: dict[Any, Outgoing] = {}
        self._connecting: dict[int, threading.Lock] = {}
        self.outgoing: dict[int, Outgoing] = {}
        # Connections to workers that are gone, whose last answers are awaited. No call is made over them.
        self._retired: set[Outgoing] = set()
        self.incoming: set[Incoming] = set()
        # Connections that have ended and are not closed yet.
        self._ended: set[Outgoing | Incoming] = set()
        self.is_closed = False
        # Whether the pool has ended.
        self._is_alone = False
        self.idle = IdleCondition()

    def all_outgoing(self) -> list[Outgoing]:
        return [*self.outgoing.values(), *self._retired]

    def all_incoming(self) -> list[Incoming]:
        return list(self.incoming)

    # -- to others ----------------------------------------------------------------------------------

    def route(self, to: Any, until: float | None = None, seconds: float = 0.0) -> Outgoing:
        """The connection to a worker. Opens one if needed, and blocks until it is open.

        Args:
            until: the call's deadline in monotonic seconds.
            seconds: its timeout, for the error.

        Raises:
            PeerLost: it cannot be reached.
            RpcTimeout: the deadline has passed.
            RpcError: there is no such worker.
        """
        try:
            return self._routes[to]
        except (KeyError, TypeError):
            return self._route(to, until, seconds)

    def _route(self, to: Any, until: float | None, seconds: float) -> Outgoing:
        member = self._roster.find(to)
        outgoing = self.outgoing.get(member.id)
        if outgoing is None or outgoing.lost_reason is not None:
            with waiting():
                outgoing = self.connect(member, until, seconds)
        with self._lock:
            if self.outgoing.get(member.id) is outgoing and not self.is_closed:
                self._routes[to] = outgoing
        return outgoing

    def watch(self, to: str) -> None:
        """Connect to a worker, so that its loss is noticed.

        Raises:
            PeerLost: it is gone, not merely late.
        """
        with contextlib.suppress(RpcTimeout):
            self.route(to, time.monotonic() + _CONNECT_SECONDS, _CONNECT_SECONDS)

    def is_connected_to(self, worker: int) -> bool:
        """Whether a call to this worker needs no new connection."""
        return worker in self.outgoing

    def connect(self, member: Member, until: float | None = None, seconds: float = 0.0) -> Outgoing:
        """The connection to a member: the existing one, or a new one by the best transport that works.

        Waits for a stopped member, as a call over an open connection does.

        Args:
            until, seconds: as for :meth:`route`.

        Raises:
            PeerLost: no transport works; the error gives the reason for each.
            RpcTimeout: the member has not answered by the deadline.
        """
        with self._lock:
            gate = self._connecting.setdefault(member.id, threading.Lock())
        why = ""
        try:
            while True:
                limit = time.monotonic() + _CONNECT_SECONDS
                if until is not None:
                    limit = min(limit, until)
                if gate.acquire(timeout=max(0.0, limit - time.monotonic())):
                    try:
                        return self._connect_first(member, limit)
                    except PeerLost as error:
                        if not is_late(error) or self.is_closed:
                            raise
                        why = f": {error.reason}"
                    finally:
                        gate.release()
                if until is not None and until <= time.monotonic():
                    raise RpcTimeout(seconds, f"{_waiting_for(member)}{why}")
        except PeerLost as error:
            if until is not None and until <= time.monotonic():
                late = f"{_waiting_for(member)}: {error.reason}"
                # Without its frames: a future that holds them would be in a cycle with its caller's.
                raise RpcTimeout(seconds, late) from error.with_traceback(None)
            raise

    def _connect_first(self, member: Member, limit: float) -> Outgoing:
        """One attempt; the caller holds the member's lock."""
        outgoing = self.outgoing.get(member.id)
        if outgoing is not None and outgoing.lost_reason is None:
            return outgoing
        dead = self._roster.dead.get(member.incarnation)
        if dead is not None:
            raise PeerLost(member.name, dead)

        def refused(reason: str) -> None:
            # The member may have died before any worker connected to it. Then nothing else reports its loss.
            self._suspect(WorkerInfo(member.name, member.id), reason, None)

        deadline = Deadline(max(0.0, limit - time.monotonic()))
        outgoing = self._dialer.dial(member, deadline, self, refused=refused)
        self._finish_writing(outgoing.line)
        with self._lock:
            closed = self.is_closed
            if not closed:
                # To the poller first: a thread that finds it in the table may arm it at once.
                self._poller.add(outgoing.line.fileno(), _Replies(self, outgoing), _HANG_UP)
                self.outgoing[member.id] = outgoing
        if closed:
            outgoing.close()
            raise PeerLost(member.name, _LEFT)
        self._look_at_host_of(outgoing.line)
        expelled = self._roster.expelled
        if expelled is not None:
            # Expelled just now: the thread that ended the other connections missed this one.
            outgoing.fail(str(expelled))
            raise Expelled(*expelled.args)
        return outgoing

    # -- from others --------------------------------------------------------------------------------

    def take(
        self,
        line: Line,
        worker: WorkerInfo,
        sharing: Sharing | None,
        rest: bytes,
        jobs: deque[Job],
    ) -> None:
        """Add an authenticated connection from a peer; ``rest`` arrived with the end of the handshake."""
        incoming = Incoming(
            line,
            worker,
            sharing,
            job=self._job,
            lost=self._lose,
            hold_back=self._poller.hold_back,
            most_unread=self._most_unread,
            listen=self._listen_to,
            submit=self._pool.submit,
            idle=self.idle,
        )
        self._finish_writing(line)
        with self._lock:
            closed = self.is_closed
            if not closed:
                self.incoming.add(incoming)
        if closed:
            incoming.close()
            return
        self._look_at_host_of(line)
        self._poller.add(line.fileno(), _Requests(self, incoming))
        incoming.feed(rest, jobs)

    def _listen_to(self, incoming: Incoming, listen: bool) -> None:
        fd = incoming.line.fileno()
        if listen:
            self._poller.change(fd, on=READ)
        else:
            self._poller.change(fd, off=READ)
            logger.info(
                "%s does not read its answers: its calls are paused until it does",
                incoming.peer.name,
            )

    def _lose(self, incoming: Incoming, reason: str) -> None:
        self._poller.remove(incoming.line.fileno())
        with self._lock:
            self.incoming.discard(incoming)
            self._ended.add(incoming)
            closed = self.is_closed
        self.idle.note()
        if not closed:
            self._suspect(incoming.peer, reason, incoming)

    # -- writing, in both directions ----------------------------------------------------------------

    def _finish_writing(self, line: Line) -> None:
        """When the socket's buffer is full, have the leader send the rest."""
        line.on_full = lambda: self._poller.change(line.fileno(), on=WRITE)

    def is_written(self, line: Line) -> None:
        """All is sent: stop polling for writability."""
        self._poller.change(line.fileno(), off=WRITE)
        if line.is_full:
            # A thread has filled the buffer again, and may have asked the poller before the line above.
            self._poller.change(line.fileno(), on=WRITE)

    # -- the Watch of an Outgoing -------------------------------------------------------------------

    def arm(self, outgoing: Outgoing) -> None:
        self._poller.change(outgoing.line.fileno(), on=READ | _HANG_UP)

    def disarm(self, outgoing: Outgoing) -> None:
        self._poller.change(outgoing.line.fileno(), off=READ | _HANG_UP)

    def kept(self, outgoing: Outgoing) -> None:
        self._kept.append(outgoing)
        self._pool.attend()

    def full(self, outgoing: Outgoing) -> None:
        self._poller.change(outgoing.line.fileno(), on=WRITE)

    def forget(self, outgoing: Outgoing) -> None:
        with self._lock:
            self._unroute(outgoing)
            self._retired.discard(outgoing)
        self.idle.note()

    def _unroute(self, outgoing: Outgoing) -> None:
        """Make no more calls over it. The caller holds the lock."""
        if self.outgoing.get(outgoing.info.id) is outgoing:
            del self.outgoing[outgoing.info.id]
        for key in [key for key, each in self._routes.items() if each is outgoing]:
            del self._routes[key]

    def lost(self, outgoing: Outgoing, reason: str) -> None:
        self._poller.remove(outgoing.line.fileno())
        with self._lock:
            self._ended.add(outgoing)
            closed = self.is_closed
        if not closed:
            self._suspect(outgoing.info, reason, outgoing)

    def wake_at(self, when: float) -> None:
        self._pool.wake_at(when)

    def failed(self, outgoing: Outgoing, forks: Sequence[Fork]) -> None:
        self._pool.submit(Task(lambda: self._inquire(outgoing.info.id, forks)))

    def unwanted(self, outgoing: Outgoing, frame: Frame) -> None:
        """Read and drop an unwanted answer, to release the references in it."""
        self._pool.submit(Task(lambda: self._read(frame, outgoing)))

    def defer(self, calls: list[Call]) -> None:
        self._pool.lead(lambda jobs: complete_soon(calls, jobs))
        if self._is_alone:
            self.complete_left()

    # -- called by the overseer ---------------------------------------------------------------------

    def tick(self) -> None:
        """Send the frames that were held back."""
        while self._kept:
            outgoing = self._kept.popleft()
            if outgoing.line.has_kept:
                outgoing.send_kept()

    def expire(self, now: float) -> float | None:
        """Fail the calls that have timed out. Returns when to call this again."""
        following: float | None = None
        for outgoing in self.all_outgoing():
            expired, then = outgoing.expire(now)
            self.defer(expired)
            if then is not None and (following is None or then < following):
                following = then
        return following

    def look_at_hosts(self, now: float) -> float | None:
        """End the connections to silent hosts. Returns when to call this again."""
        if self._look_at is not None and self._look_at <= now:
            # Before the check: a line that is added from here on sets it again.
            self._look_at = None
            reason = f"its host has not answered for {self._heartbeat:g} s"
            outgoing, incoming = self.all_outgoing(), self.all_incoming()
            for call_end in outgoing:
                if call_end.line.host_is_gone(now):
                    call_end.fail(reason)
            for served_end in incoming:
                if served_end.line.host_is_gone(now):
                    served_end.end(reason)
            lines = [*(each.line for each in outgoing), *(each.line for each in incoming)]
            if any(each.silence for each in lines):
                self._look_at = now + self._heartbeat / LOOKS
        return self._look_at

    def _look_at_host_of(self, line: Line) -> None:
        if line.silence is not None and self._look_at is None:
            self._look_at = look_at = time.monotonic() + self._heartbeat / LOOKS
            self._pool.wake_at(look_at)

    # -- the end ------------------------------------------------------------------------------------

    def hang_up(
        self, worker: int, member: Member | None, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        """A worker is gone: make no more calls over its connection, and fail those that it does not answer.

        Its answers may still be on the way. After them, the connection ends on its own, unless the host is gone too. So it
        is ended here only if that takes long.

        Args:
            member: hang up only on this member, not on a later one with the same id; None: on either.
            later: calls a function after a delay in seconds.
        """
        with self._lock:
            outgoing = self.outgoing.get(worker)
            if outgoing is None or (
                member is not None and outgoing.incarnation != member.incarnation
            ):
                return
            # The connection has not failed yet, or it would not be in the table. When it fails, it is forgotten.
            self._unroute(outgoing)
            self._retired.add(outgoing)
        if outgoing.calls:
            later(_LAST_ANSWERS, outgoing.hang_up)
        else:
            outgoing.hang_up()

    def close_ended(self, ended: Outgoing | Incoming) -> None:
        """Release the resources of a lost connection."""
        ended.close()
        with self._lock:
            self._ended.discard(ended)

    def close_all_ended(self) -> None:
        """Close all lost connections: the pool, which otherwise does so, has ended."""
        with self._lock:
            left = list(self._ended)
            self._ended.clear()
        for connection in left:
            connection.close()

    def stop(self) -> tuple[list[Outgoing], list[Incoming]] | None:
        """Allow no new connections. Returns the existing ones, for the caller to end; None if already stopped."""
        with self._lock:
            if self.is_closed:
                return None
            self.is_closed = True
            outgoing = self.all_outgoing()
            incoming = list(self.incoming)
            for table in (self._routes, self.outgoing, self._retired):
                table.clear()
        return outgoing, incoming

    def abandon(self) -> None:
        """In a forked child."""
        self._lock = threading.Lock()
        self.is_closed = True
        self.idle.abandon()
        for each in (*self.all_outgoing(), *self.incoming, *self._ended):
            each.abandon()
        for table in (
            *(self._routes, self.outgoing, self._retired),
            *(self.incoming, self._ended, self._kept),
        ):
            table.clear()

    def be_alone(self) -> None:
        """The pool is ending, and completes no more calls."""
        self._is_alone = True
        self.complete_left()

    def complete_left(self) -> None:
        """Complete the calls that the ended pool did not."""
        for job in self._pool.take_left():
            if isinstance(job, (Completion, Completions)):
                job.run()


class _Requests:
    """An incoming connection in the poller."""

    __slots__ = ("_connections", "_incoming")

    def __init__(self, connections: Connections, incoming: Incoming) -> None:
        self._connections = connections
        self._incoming = incoming

    def on_ready(self, mask: int, jobs: deque[Job]) -> None:
        incoming = self._incoming
        if mask & WRITE and not incoming.line.is_full:
            self._connections.is_written(incoming.line)
        incoming.on_ready(mask, jobs)


class _Replies:
    """An outgoing connection in the poller."""

    __slots__ = ("_connections", "_outgoing")

    def __init__(self, connections: Connections, outgoing: Outgoing) -> None:
        self._connections = connections
        self._outgoing = outgoing

    def on_ready(self, mask: int, jobs: deque[Job]) -> None:
        outgoing = self._outgoing
        if mask & WRITE:
            try:
                if outgoing.line.flush():
                    self._connections.is_written(outgoing.line)
            except ConnectionError as error:
                outgoing.fail(str(error))
                return
        if mask & ~WRITE:
            outgoing.read_now(lambda calls: complete_soon(calls, jobs))


def _waiting_for(member: Member) -> str:
    return f"waiting for a connection to {member.name!r}"
