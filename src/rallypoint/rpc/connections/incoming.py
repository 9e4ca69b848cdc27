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
    """A request that is in line or being worked on."""

    def cancel(self) -> None:
        """The caller has given it up."""

    def credit(self, amount: int) -> None:
        """The caller takes so many more items of a stream."""

    def abandon(self) -> None:
        """In a forked child: whatever comes of it goes nowhere. Takes no lock."""


class Incoming:
    """A connection that a peer has opened and proved itself on.

    Args:
        line: connected.
        peer: who.
        sharing: the way of large buffers, or None.
        job: makes what the pool does out of a request.
        lost: called once when the connection ends, with the reason.
        hold_back: has :meth:`flush` called when the leader has no more jobs at hand.
        most_unread: bytes of answers that the peer may leave unread; beyond that no further requests of it are taken.
        listen: told whether there are to be any, when that changes.
        submit: has a request done that was read, and waited.
        idle: told when a request is answered.
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
        # Taken out of the others, and not handed to the kernel yet.
        self._answering: set[int] = set()
        self._job = job
        self._lost = lost
        self._hold_back = hold_back
        self._most_unread = most_unread
        self._listen = listen
        self._submit = submit
        # Set under its lock: the peer is not listened to until it reads. And its requests that wait for that.
        self.is_deaf = False
        self._deaf_lock = threading.Lock()
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
                self._hear()
            if mask & ~WRITE or not self.is_deaf:
                self._take(self.line.read_now(), jobs)
        except (Closed, ProtocolError) as error:
            self.end(str(error))

    def feed(self, data: bytes, jobs: deque[Job]) -> None:
        """What came together with the last bytes of the handshake."""
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
                raise ProtocolError(f"{self.peer} has sent a request of kind {kind}")

    def _cancel(self, number: int) -> None:
        served = self.active.get(number)
        if served is not None:
            served.cancel()

    def claim(self, number: int) -> bool:
        """Whether the caller is the one to answer this request: nobody else has, or has given it up."""
        # Into the one before out of the other: who looks whether all is done must find it.
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
        """Whether nothing is being done for the peer, and all answers are on their way."""
        # In the order in which an answer goes through them; the lock is held while some are handed to the kernel.
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
        """Answer a request. Does not wait; an answer to a peer that has gone is dropped.

        Args:
            home, is_alone: of a buffer that may go back as it came, as :meth:`~.wire.sharing.Sharing.place` says.
            held: kept until the buffers are sent.
            later: send it together with the next ones, at :meth:`flush`.

        Returns:
            False if it has certainly not left.
        """
        if self._ended:
            # What it asked for was given up with it: that is not what it shall read in its last moment.
            return False
        placed: Sequence[Shared | memoryview] = buffers
        if buffers and self.sharing is not None:
            placed, _ = self.sharing.place(buffers, home=home, is_alone=is_alone)
        pieces = encode(kind, number, payload, placed, flags=flags)
        if later and len(pieces) == 1:
            self._held.append(pieces[0])  # type: ignore[arg-type]  # the only piece is bytes
            # In this order: a flush clears the mark first, and takes all that is there then.
            if not self._is_marked:
                self._is_marked = True
                self._hold_back(self)
            return True
        with contextlib.suppress(Closed):
            if not self.line.send(pieces, held):
                self._hear()
        return True

    def _hear(self) -> None:
        """Listen to a peer that reads what it is told, and to no other."""
        parked: list[Job] = []
        with self._deaf_lock:
            left = self.line.left
            deaf = left > (self._most_unread // 2 if self.is_deaf else self._most_unread)
            if deaf != self.is_deaf:
                self.is_deaf = deaf
                self._listen(self, not deaf)
            if not deaf:
                parked, self._parked = self._parked, parked
        for each in parked:
            self._submit(each)

    def park(self, job: Job) -> bool:
        """Keep a request until the peer reads; False if it does again."""
        with self._deaf_lock:
            if self.is_deaf:
                self._parked.append(job)
            return self.is_deaf

    def flush(self) -> None:
        """Send what was held back."""
        self._is_marked = False
        with self._lock:
            pieces = []
            while self._held:
                pieces.append(self._held.popleft())
            if pieces:
                with contextlib.suppress(Closed):
                    if not self.line.send([b"".join(pieces) if len(pieces) > 1 else pieces[0]]):
                        self._hear()
        if self._idle.is_wanted:
            self._idle.note()

    # -- the end ----------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """The peer has gone, or we leave: what it waits for is given up. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        for served in list(self.active.values()):
            served.cancel()
        with self._deaf_lock:
            self.is_deaf = False
            parked, self._parked = self._parked, []
        for each in parked:
            self._submit(each)  # which drops what they carry
        self._lost(self, reason)

    def finish(self, deadline: Deadline) -> None:
        """We leave: what has been answered still goes out, then it ends."""
        self.flush()
        with contextlib.suppress(Closed, DeadlineExceeded):
            if self.line.is_full:
                self.line.push(deadline)
        self.end("this worker has left the group")

    def abandon(self) -> None:
        """In a forked child: the parent answers. What forked in the middle of a request has nobody to answer here."""
        self._lock = threading.Lock()
        self._deaf_lock = threading.Lock()
        self._ended = True
        for served in self.active.values():
            served.abandon()
        self.active.clear()
        self._held.clear()

    def close(self) -> None:
        """Give the sockets back; called when nobody reads any more."""
        self.line.shut()
        self.line.close()
        if self.sharing is not None:
            self.sharing.close()
