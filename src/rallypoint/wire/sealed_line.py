"""Lines that send and receive sealed records (``seal.py``) over a connected socket."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from rallypoint.errors import FrameChanged

from .frames import Buffer, Frame
from .line import MOST_AT_ONCE, Closed, Line, Piece, Sleeper
from .seal import MOST, SHORT, Keys, SealedParser, Sealer
from .silence import Silence
from .wrapped_socket import WrappedSocket, drop


# A piece of this many bytes or more starts a new record, so that it can be received directly into its memory.
_LARGE: Final = 64 * 1024


class SealedSocket(WrappedSocket):
    """A socket with the methods that a line uses. One thread at a time may receive, and one may send.

    Once a record is made, it must be sent exactly once and in order. So bytes count as sent only when the kernel has
    accepted their whole record. The rest of a record stays here, and the caller must begin the next send with the bytes
    that were not counted. They are not sealed again.

    Args:
        sock: connected; this object owns it.
        keys: those of this direction.
        allocate: as for :class:`Sealer`.
    """

    def __init__(
        self, sock: socket.socket, keys: Keys, allocate: Callable[[int], Buffer] = bytearray
    ) -> None:
        super().__init__(sock)
        self._sealer = Sealer(keys, allocate)
        # The unsent rest of a record, and how many of the caller's bytes are in the record.
        self._pending = memoryview(b"")
        self._uncounted = 0
        # Bound directly: called for every message.
        self.recv_into = sock.recv_into
        self.fileno = sock.fileno

    def send(self, data: Piece, flags: int = 0) -> int:
        """Like ``socket.send``, with the rule for partial sends above.

        Raises:
            BlockingIOError: the kernel did not accept all of the first record.
            OSError: the connection broke.
        """
        size = len(data)
        if self._uncounted or size > SHORT:
            return self.sendmsg((data,), (), flags)
        record = self._sealer.short(data)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self._sock.send(record, flags)
        if sent == len(record):
            return size
        self._pending, self._uncounted = memoryview(record)[sent:], size
        raise BlockingIOError

    def sendmsg(
        self, pieces: Iterable[Piece], _ancillary: Iterable[Any] = (), flags: int = 0
    ) -> int:
        """:meth:`send` for several pieces."""
        left = deque(view for each in pieces if (view := memoryview(each).cast("B")))
        sent = 0
        try:
            while True:
                while self._pending:
                    self._pending = self._pending[self._sock.send(self._pending, flags) :]
                count, self._uncounted = self._uncounted, 0
                drop(left, count)
                sent += count
                if not left:
                    self._pending = memoryview(b"")
                    self._sealer.release()
                    return sent
                if sent >= MOST_AT_ONCE:
                    return sent
                parts = _first(left)
                self._uncounted = sum(map(len, parts))
                if self._uncounted > SHORT:
                    self._pending = self._sealer.long(parts)
                else:
                    self._pending = memoryview(self._sealer.short(b"".join(parts)))
        except BlockingIOError:
            if not sent:
                raise
            return sent


class SealedLine(Line):
    """A line over a :class:`SealedSocket`, with a :class:`SealedParser`.

    Args:
        changed: called when data was altered in transit, before the line ends.
        kind, silence: as for :class:`Line`.
    """

    _parser: SealedParser

    def __init__(
        self,
        sock: SealedSocket,
        parser: SealedParser,
        kind: str = "",
        *,
        changed: Callable[[], None] = lambda: None,
        silence: Silence | None = None,
    ) -> None:
        super().__init__(sock, parser, kind, silence=silence)
        self._changed = changed

    def read_now(self) -> list[Frame]:
        try:
            return self._read_on(super().read_now())
        except FrameChanged:
            self._changed()
            raise

    def read(self, left: float | None, sleeper: Sleeper | None = None) -> list[Frame]:
        try:
            return self._read_on(super().read(left, sleeper))
        except FrameChanged:
            self._changed()
            raise

    def parse(self, data: bytes) -> list[Frame]:
        try:
            return super().parse(data)
        except FrameChanged:
            self._changed()
            raise

    def _read_on(self, frames: list[Frame]) -> list[Frame]:
        """Receive more of a large buffer at once, which is faster than one part per call."""
        total, parser = 0, self._parser
        while parser.is_amid_buffer and not frames and total < MOST_AT_ONCE:
            try:
                count = self._sock.recv_into(parser.space(), 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                raise self._gone(error) from None
            if not count:
                raise Closed("the other end has closed the connection")
            total += count
            frames += parser.received(count)
        self.bytes_received += total
        return frames


def _first(left: deque[memoryview]) -> list[memoryview]:
    """The parts for the next record. Does not remove them."""
    parts, room = [left[0][:MOST]], MOST - len(left[0])
    for index in range(1, len(left)):
        each = left[index]
        if room <= 0 or len(each) >= _LARGE:
            break
        parts.append(each[:room])
        room -= len(each)
    return parts
