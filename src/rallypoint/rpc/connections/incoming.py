"""The connection on which one peer calls this process: requests come in, replies go out."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, ProtocolError
from rallypoint.rpc.references.sent import SentReferences
from rallypoint.rpc.threads.poller import WRITE
from rallypoint.rpc.threads.thread_pool import Job
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.wire.frames import Frame, Shared, encode
from rallypoint.wire.line import Closed, Line
from rallypoint.wire.sharing import Sharing

from .idle import IdleCondition
from .messages import CANCEL, CREDIT, REPLY


class Served(Protocol):
    """A request that is queued or being served."""

    def cancel(self) -> None:
        """The caller has cancelled it."""

    def credit(self, amount: int) -> None:
        """The caller accepts this many more items of a stream."""

    def abandon(self) -> None:
        """In a forked child: its result is dropped. Takes no lock."""


class Incoming:
    """An authenticated connection that a peer opened.

    Args:
        line: connected.
        peer: the other end.
        sharing: shared memory for large buffers, or None.
        job: turns a request into a job for the pool.
        lost: called once when the connection ends, with the reason.
        hold_back: has :meth:`flush` called when the leader has no more jobs at hand.
        most_unread: bytes of unread answers beyond which the peer's requests are paused.
        listen: called when requests are paused (False) or resumed.
        submit: gives the pool a parked request.
        idle: notified when a request is answered.
    """

    def __init__(
        self,
        line: Line,
        peer: WorkerInfo,
        sharing: Sharing | None,
        *,
        job: Callable[[Incoming, Frame], Job],
        lost: Callable[[Incoming, str], None],
        hold_back: Callable[[Incoming], None],
        most_unread: int,
        listen: Callable[[Incoming, bool], None],
        submit: Callable[[Job], None],
        idle: IdleCondition,
    ) -> None:
        self.line = line
        self.peer = peer
        self.sharing = sharing
        self.active: dict[int, Served] = {}
        self.sent_references = SentReferences()
        # Requests whose answers are not handed to the kernel yet.
        self._answering: set[int] = set()
        self._job = job
        self._lost = lost
        self._hold_back = hold_back
        self._most_unread = most_unread
        self._listen = listen
        self._submit = submit
        # Under the lock: whether requests are paused until the peer reads, and the requests that wait for that.
        self.is_paused = False
        self._pause_lock = threading.Lock()
        self._parked: list[Job] = []
        self._held: deque[bytes] = deque()
        self._is_marked = False
        self._lock = threading.Lock()
        self._idle = idle
        self._ended = False

    # -- requests: called by the leader -------------------------------------------------------------

    def on_ready(self, mask: int, jobs: deque[Job]) -> None:
        try:
            if mask & WRITE:
                self.line.flush()
                self._pause_or_resume()
            if mask & ~WRITE or not self.is_paused:
                self._take(self.line.read_now(), jobs)
        except (Closed, ProtocolError) as error:
            self.end(str(error))

    def feed(self, data: bytes, jobs: deque[Job]) -> None:
        """Take data that arrived with the end of the handshake."""
        try:
            self._take(self.line.parse(data), jobs)
        except ProtocolError as error:
            self.end(str(error))

    def _take(self, frames: Sequence[Frame], jobs: deque[Job]) -> None:
        for frame in frames:
            kind = frame.kind
            if kind == CANCEL:
                self._cancel(frame.call)
            elif kind == CREDIT:
                served = self.active.get(frame.call)
                if served is not None:
                    served.credit(int.from_bytes(frame.payload[:8], "little"))
            elif 0 < kind < REPLY:
                jobs.append(self._job(self, frame))
            else:
                raise ProtocolError(f"{self.peer} sent a request of unknown kind {kind}")

    def _cancel(self, number: int) -> None:
        served = self.active.get(number)
        if served is not None:
            served.cancel()

    def claim(self, number: int) -> bool:
        """Whether the caller may answer this request: it has not been answered or cancelled."""
        # Added here before it is removed from active, so that is_idle does not miss it.
        self._answering.add(number)
        if self.active.pop(number, None) is None:
            self.answered(number)
            return False
        return True

    def answered(self, number: int) -> None:
        """The answer is on its way."""
        self._answering.discard(number)
        if self._idle.is_wanted:
            self._idle.note()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being served, and all answers are handed to the kernel."""
        # Checked in the order in which an answer passes through them. flush() holds the lock while it sends.
        return not (self.active or self._answering or self._held or self._lock.locked())

    # -- replies ----------------------------------------------------------------------------------

    def reply(
        self,
        kind: int,
        number: int,
        payload: bytes = b"",
        buffers: Sequence[memoryview] = (),
        *,
        held: Any = None,
        later: bool = False,
        flags: int = 0,
        home: int = 0,
        is_alone: bool = False,
    ) -> bool:
        """Answer a request. Does not block; the answer is dropped if the peer is gone.

        Args:
            home, is_alone: for a buffer that may be returned in place; see :meth:`~.wire.sharing.Sharing.place`.
            held: kept alive until the buffers are sent.
            later: hold it back until :meth:`flush`, to send several at once.

        Returns:
            False if it was definitely not sent.
        """
        if self._ended:
            # The answer may be to a request that end() has cancelled: the peer must not read it.
            return False
        placed: Sequence[Shared | memoryview] = buffers
        if buffers and self.sharing is not None:
            placed, _ = self.sharing.place(buffers, home=home, is_alone=is_alone)
        pieces = encode(kind, number, payload, placed, flags=flags)
        if later and len(pieces) == 1:
            self._held.append(pieces[0])  # type: ignore[arg-type]  # the only piece is bytes
            # In this order: flush() clears the mark before it takes the answers.
            if not self._is_marked:
                self._is_marked = True
                self._hold_back(self)
            return True
        with contextlib.suppress(Closed):
            if not self.line.send(pieces, held):
                self._pause_or_resume()
        return True

    def _pause_or_resume(self) -> None:
        """Backpressure: pause the requests of a peer with too many unread answers."""
        parked: list[Job] = []
        with self._pause_lock:
            left = self.line.left
            pause = left > (self._most_unread // 2 if self.is_paused else self._most_unread)
            if pause != self.is_paused:
                self.is_paused = pause
                self._listen(self, not pause)
            if not pause:
                parked, self._parked = self._parked, parked
        for each in parked:
            self._submit(each)

    def park(self, job: Job) -> bool:
        """Keep a request until the peer reads its answers; False if requests are not paused."""
        with self._pause_lock:
            if self.is_paused:
                self._parked.append(job)
            return self.is_paused

    def flush(self) -> None:
        """Send the answers that were held back."""
        self._is_marked = False
        with self._lock:
            pieces = []
            while self._held:
                pieces.append(self._held.popleft())
            if pieces:
                with contextlib.suppress(Closed):
                    if not self.line.send([b"".join(pieces) if len(pieces) > 1 else pieces[0]]):
                        self._pause_or_resume()
        if self._idle.is_wanted:
            self._idle.note()

    # -- the end ----------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """The peer is gone, or this worker leaves: cancel its requests. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        for served in list(self.active.values()):
            served.cancel()
        with self._pause_lock:
            self.is_paused = False
            parked, self._parked = self._parked, []
        for each in parked:
            self._submit(each)  # which drops it, and releases what it carries
        self._lost(self, reason)

    def finish(self, deadline: Deadline) -> None:
        """This worker leaves: send the answers that are ready, then end."""
        self.flush()
        with contextlib.suppress(Closed, DeadlineExceeded):
            if self.line.is_full:
                self.line.push(deadline)
        self.end("this worker has left the group")

    def abandon(self) -> None:
        """In a forked child: only the parent answers, even if a request forked."""
        self._lock = threading.Lock()
        self._pause_lock = threading.Lock()
        self._ended = True
        for served in self.active.values():
            served.abandon()
        self.active.clear()
        self._held.clear()

    def close(self) -> None:
        """Close the sockets. Called once no thread reads any more."""
        self.line.shut()
        self.line.close()
        if self.sharing is not None:
            self.sharing.close()
