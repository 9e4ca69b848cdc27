"""A connected socket as a line of frames: any thread sends, one thread at a time receives.

Nothing here waits unless it is asked to: :meth:`Line.send` hands the kernel what it takes and keeps the rest, which
goes out with :meth:`Line.flush` when the socket can be written to again, or with :meth:`Line.push`, which waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, Protocol

from rallypoint._core import clock
from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded

from .buffers import address_of
from .busy_wait import LOOK, SPIN, BusyWait
from .frames import Frame, FrameParser
from .silence import INFO_SIZE, Silence, TcpState


# How long a waiting receiver sleeps in the kernel before it checks its deadline.
PATIENCE = 1.0
_DONT_WAIT = socket.MSG_DONTWAIT
# The most bytes to send before checking the clock and other work.
MOST_AT_ONCE = 16 << 20
# The most buffers that sendmsg accepts on Linux (IOV_MAX).
_MOST_PIECES = 1024
_recv = ctypes.PyDLL(None, use_errno=True).recv
_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_recv.restype = ctypes.c_ssize_t

Piece = bytes | bytearray | memoryview


class Closed(ConnectionError):
    """The other end has closed the line, or is gone."""


class Stream(Protocol):
    """The methods of a socket that a line uses."""

    def fileno(self) -> int: ...

    def send(self, data: Piece, flags: int = ..., /) -> int: ...

    def sendmsg(
        self, pieces: Iterable[Piece], ancillary: Iterable[Any] = ..., flags: int = ..., /
    ) -> int: ...

    def recv_into(self, buffer: memoryview, size: int = ..., flags: int = ..., /) -> int: ...

    def settimeout(self, seconds: float | None, /) -> None: ...

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None: ...

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class Rest(Protocol):
    """Calls a sleeping function, and may end the sleep with its own exception; then ``is_lent`` is true."""

    is_lent: bool

    def call(self, sleep: Callable[[Any], Any], argument: Any) -> Any: ...


class Sleeper(Protocol):
    """The reader of a line."""

    def rest(self) -> Rest | None:
        """What must call the sleeping function; None if it can be called directly."""


class Line:
    """A stream socket that carries frames.

    Args:
        sock: connected; it is taken over.
        parser: takes what arrives.
        kind: the transport's name.
        on_full: called when the kernel takes no more for now; somebody must call :meth:`flush` when it does again.
        silence: finds out whether the other end's host is gone, over TCP.
    """

    def __init__(
        self,
        sock: Stream,
        parser: FrameParser,
        kind: str = "",
        on_full: Callable[[], None] | None = None,
        silence: Silence | None = None,
    ) -> None:
        self.kind = kind
        self.silence = silence
        self._sock = sock
        self._parser = parser
        # The parser's own small memory, and its end.
        space = parser.space()
        self._memory, self._memory_end = space.obj, address_of(space) + len(space)
        self.on_full = on_full
        self._lock = threading.Lock()
        self._outbox: deque[memoryview] = deque()
        # Bytes in the outbox.
        self._left = 0
        # Bytes that were ever put there.
        self._queued = 0
        # Owners of the memory in the outbox, with the place of their last byte among all that were put there: a tensor must
        # not be freed before it is sent, nor kept until everything after it is sent.
        self._held: deque[tuple[int, object]] = deque()
        self._closed = False
        self._busy_wait = BusyWait()
        # Small frames that go out together.
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        # The longest sleep of a recv without a timeout: setting it once is cheaper than poll() each time.
        sock.settimeout(None)
        seconds = struct.pack("ll", int(PATIENCE), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        self.bytes_sent = 0
        self.bytes_received = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    # -- sending ---------------------------------------------------------------------------------

    def send(self, pieces: Sequence[Piece], held: object = None) -> bool:
        """Send a whole frame after those before it. Does not wait.

        Args:
            pieces: bytes, one after the other.
            held: kept until all of it is sent.

        Returns:
            True if the kernel has taken everything.

        Raises:
            Closed: the other end is gone.
        """
        with self._lock:
            if self._kept:
                pieces = [*self._take_kept(), *pieces]
            if self._outbox:
                # No empty pieces: the kernel takes no bytes of them, so they would be retried forever.
                for each in pieces:
                    self._put(memoryview(each).cast("B"))
                self._hold(held)
                return False
            try:
                if len(pieces) == 1:
                    first = pieces[0]
                    sent = self._sock.send(first, _DONT_WAIT)
                    self.bytes_sent += sent
                    if sent == len(first):
                        return True
                else:
                    sent = self._sock.sendmsg(pieces[:_MOST_PIECES], (), _DONT_WAIT)
                    self.bytes_sent += sent
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._gone(error) from None
            for each in pieces:
                view = memoryview(each).cast("B")
                if sent >= len(view):
                    sent -= len(view)
                else:
                    self._put(view[sent:])
                    sent = 0
            if not self._outbox:
                return True
            self._hold(held)
        on_full = self.on_full
        if on_full is not None:
            on_full()
        return False

    def _put(self, view: memoryview) -> None:
        if view:
            if type(view.obj) is bytearray:
                # A view would keep the owner from resizing its array, which it may already be using again.
                view = memoryview(bytes(view))
            self._outbox.append(view)
            self._left += len(view)
            self._queued += len(view)

    def _hold(self, held: object) -> None:
        if held is not None:
            self._held.append((self._queued, held))

    def _let_go(self) -> None:
        """Let go of the owners whose last byte the kernel has taken."""
        taken = self._queued - self._left
        while self._held and self._held[0][0] <= taken:
            self._held.popleft()

    def send_later(self, piece: bytes) -> int:
        """Keep a whole frame until the next :meth:`send` or :meth:`flush`: one write for many frames.

        Returns:
            how many bytes are kept now. The caller must see to it that they go out soon.
        """
        with self._lock:
            self._kept.append(piece)
            self._kept_bytes += len(piece)
            return self._kept_bytes

    @property
    def has_kept(self) -> bool:
        return bool(self._kept)

    def _take_kept(self) -> list[bytes]:
        kept = b"".join(self._kept)
        self._kept.clear()
        self._kept_bytes = 0
        return [kept]

    def flush(self) -> bool:
        """Send what is left, as far as the kernel takes it, up to ``MOST_AT_ONCE`` bytes. True if nothing is left."""
        total = 0
        with self._lock:
            if self._kept:
                for each in self._take_kept():
                    self._put(memoryview(each))
            while self._outbox:
                if total >= MOST_AT_ONCE:
                    return False
                pieces = [self._outbox[0]]
                if len(self._outbox) > 1:
                    pieces = [self._outbox[i] for i in range(min(len(self._outbox), _MOST_PIECES))]
                try:
                    sent = self._sock.sendmsg(pieces, (), _DONT_WAIT)
                except BlockingIOError:
                    return False
                except OSError as error:
                    raise self._gone(error) from None
                total += sent
                self.bytes_sent += sent
                self._left -= sent
                while sent:
                    first = self._outbox.popleft()
                    if sent < len(first):
                        self._outbox.appendleft(first[sent:])
                        break
                    sent -= len(first)
                self._let_go()
        return True

    def push(self, deadline: Deadline) -> None:
        """Send all that is left; waits.

        Raises:
            Closed: the other end is gone.
            DeadlineExceeded: the other end has not taken it in time.
        """
        while not self.flush():
            left = deadline.remaining()
            if left == 0.0:
                raise DeadlineExceeded("the other end does not read what we send")
            self._wait(select.POLLOUT, left)

    @property
    def is_full(self) -> bool:
        """Whether something is left to be sent."""
        return bool(self._outbox)

    @property
    def left(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._left

    # -- receiving -------------------------------------------------------------------------------

    def read_now(self) -> list[Frame]:
        """Frames that are complete with the bytes that have arrived. Does not wait.

        Raises:
            Closed: the other end is gone.
            ProtocolError: invalid data was received.
        """
        space = self._parser.space()
        try:
            if space.obj is self._memory:
                count = _receive(self._sock.fileno(), self._memory_end, len(space))
            else:
                count = self._sock.recv_into(space, 0, _DONT_WAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise self._gone(error) from None
        if not count:
            raise Closed("the other end has closed the connection")
        self.bytes_received += count
        return self._parser.received(count)

    def read(self, left: float | None, sleeper: Sleeper | None = None) -> list[Frame]:
        """Wait until something arrives, at most ``left`` seconds. Returns no frames if none is complete by then.

        Args:
            sleeper: asked before a sleep. When its rest raises, nothing has been read.

        Raises:
            Closed: the other end is gone.
            ProtocolError: invalid data was received.
        """
        began = perf_counter()
        rest: Rest | None = None
        try:
            count = self._spin(began) if self._busy_wait.is_worth_it() else -1
            if count < 0:
                if sleeper is not None:
                    rest = sleeper.rest()
                is_short = left is not None and left < PATIENCE
                if is_short and not self._wait(select.POLLIN, left, rest):
                    return []
                if rest is None:
                    count = self._sock.recv_into(self._parser.space())
                else:
                    count = rest.call(self._sock.recv_into, self._parser.space())
                self._busy_wait.slept(perf_counter() - began)
        except OSError as error:
            if rest is not None and rest.is_lent:
                # Not from the socket: a signal handler raised it.
                raise
            if isinstance(error, BlockingIOError):
                return []
            raise self._gone(error) from None
        if not count:
            raise Closed("the other end has closed the connection")
        self.bytes_received += count
        return self._parser.received(count)

    def _spin(self, began: float) -> int:
        """Busy-wait for a moment; the number of bytes received, or -1."""
        recv_into, space, until = self._sock.recv_into, self._parser.space(), began + SPIN
        now = began
        while True:
            try:
                count = recv_into(space, 0, _DONT_WAIT)
            except BlockingIOError:
                before, now = now, perf_counter()
                if now > until or now - before > LOOK:
                    self._busy_wait.tried(False)
                    return -1
            else:
                self._busy_wait.tried(True)
                return count

    def parse(self, data: bytes) -> list[Frame]:
        """Frames in bytes that were received together with the end of a handshake."""
        return self._parser.feed(data) if data else []

    def host_is_gone(self, now: float) -> bool:
        """Whether the other end's host has been silent for too long; call it as :class:`Silence` says."""
        if self.silence is None:
            return False
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_SIZE)
        except OSError:
            # Another thread has closed it.
            return False
        return self.silence.is_gone(now, TcpState.parse(info))

    def _wait(self, event: int, left: float | None, rest: Rest | None = None) -> bool:
        poll = select.poll()
        try:
            poll.register(self._sock, event)
        except ValueError:
            # Another thread has just closed it, so it no longer has a descriptor.
            raise Closed("this end has closed the connection") from None
        milliseconds = None if left is None else clock.milliseconds(left)
        return bool(poll.poll(milliseconds) if rest is None else rest.call(poll.poll, milliseconds))

    def _gone(self, error: OSError) -> Closed:
        if self._closed:
            return Closed("this end has closed the connection")
        return Closed(f"the connection broke: {error.strerror or error}")

    # -- the end ---------------------------------------------------------------------------------

    def shut(self) -> None:
        """End the connection in both directions, which wakes readers. The descriptor stays until :meth:`close`."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. No thread may still be reading: call :meth:`shut` first."""
        self._closed = True
        with self._lock:
            self._outbox.clear()
            self._left = 0
            self._held.clear()
            self._sock.close()
        # on_full usually refers to this line. Without the cycle, the parser's memory is freed now, not in a later collection.
        self.on_full = None


def _receive(fd: int, end: int, room: int) -> int:
    """Read what has arrived into the last ``room`` bytes of some memory, without releasing the GIL.

    A thread that computes in Python would take the GIL, and keep it for 5 ms. The kernel needs a microsecond.

    Raises:
        OSError: as ``socket.recv_into``.
    """
    count: int = _recv(fd, end - room, room, _DONT_WAIT)
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count
