"""Framing of messages on a stream of bytes. No I/O.

A frame is a header, descriptors of its buffers, a payload, and then the inline buffers::

    header      24 bytes   payload length u32, kind u8, flags u8, number of buffers u16,
                           call u64, time left u32 (ms, 0: no limit), spare u32
    descriptor  24 bytes   size u64, offset u64, segment u32 (INLINE: follows below), slot u32
    payload                a pickle, or nothing
    buffers                the inline ones, in order

Large buffers and payloads are received directly into their own memory, from ``allocate``: the kernel's is the only copy.

Integers are little-endian. A header that exceeds a limit ends the connection (``ProtocolError``): the boundaries of
later frames are unknown.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rallypoint.errors import MessageTooLarge, ProtocolError

from .buffers import on_demand


HEADER = struct.Struct("<IBBHQII")
DESCRIPTOR = struct.Struct("<QQII")
INLINE = 0xFFFFFFFF
# Bytes per read. More has no effect on a Unix socket, whose buffer has 208 KiB.
READ_SIZE = 256 * 1024
MAX_TIME_LEFT = 0xFFFFFFFF

# Anything with the buffer protocol.
Buffer = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits for frames from a peer.

    Args:
        payload: bytes of one payload, without tensors.
        buffers: how many buffers one frame may have.
        buffer: bytes of all buffers of one frame.
    """

    payload: int = 1 << 30
    buffers: int = 1 << 14
    buffer: int = 1 << 40


# Every end accepts these, so senders check them, too (:func:`check`).
LIMITS = Limits()


class Shared(NamedTuple):
    """A buffer in shared memory."""

    segment: int
    slot: int
    offset: int
    size: int


def size_of(buffer: Buffer | Shared) -> int:
    """The bytes of a buffer in a received frame."""
    return buffer.size if isinstance(buffer, Shared) else memoryview(buffer).nbytes


class Frame(NamedTuple):
    """A received frame.

    Args:
        time_left: milliseconds that the caller still waits; 0: no limit.
        buffers: received bytes, or their places in shared memory.
    """

    kind: int
    flags: int
    call: int
    time_left: int
    payload: bytes | bytearray | memoryview
    buffers: Sequence[Buffer | Shared]


def check(payload: int, buffers: Sequence[memoryview]) -> None:
    """Check a frame with a payload of this many bytes, and these buffers, against the limits.

    Raises:
        MessageTooLarge: it exceeds one.
    """
    limits = LIMITS
    if payload > limits.payload:
        raise MessageTooLarge(
            "bytes beside its tensors",
            payload,
            limits.payload,
            "send it in parts, or large data as tensors, arrays or bytes",
        )
    if len(buffers) > limits.buffers:
        raise MessageTooLarge(
            "tensors that travel on their own",
            len(buffers),
            limits.buffers,
            "stack or concatenate them, or split the call",
        )
    total = sum(each.nbytes for each in buffers)
    if total > limits.buffer:
        raise MessageTooLarge("bytes in tensors", total, limits.buffer, "split the call")


def header(
    kind: int, call: int, payload: int, *, flags: int = 0, buffers: int = 0, time_left: int = 0
) -> bytes:
    """The header of a frame whose payload has this many bytes."""
    return HEADER.pack(payload, kind, flags, buffers, call, time_left, 0)


def encode(
    kind: int,
    call: int,
    payload: bytes,
    buffers: Sequence[Shared | memoryview] = (),
    *,
    flags: int = 0,
    time_left: int = 0,
) -> list[bytes | memoryview]:
    """A frame as pieces, to be sent in order.

    Args:
        buffers: bytes to send inline, or their places in shared memory.
        time_left: milliseconds; at most 49 days.
    """
    if time_left > MAX_TIME_LEFT:
        time_left = MAX_TIME_LEFT
    first = HEADER.pack(len(payload), kind, flags, len(buffers), call, time_left, 0)
    if not buffers:
        return [first + payload]
    descriptors = [first]
    inline: list[bytes | memoryview] = []
    for each in buffers:
        if isinstance(each, Shared):
            descriptors.append(DESCRIPTOR.pack(each.size, each.offset, each.segment, each.slot))
        else:
            descriptors.append(DESCRIPTOR.pack(each.nbytes, 0, INLINE, 0))
            inline.append(each)
    descriptors.append(payload)
    return [b"".join(descriptors), *inline]


class FrameParser:
    """Parses frames from bytes as they arrive.

    The owner receives into :meth:`space`, and passes the number of bytes to :meth:`received`.

    Args:
        limits: ``LIMITS`` by default.
        allocate: returns writable memory of at least this many bytes; a bytearray by default. The size is what a peer
            has announced, so memory that the system provides as it is filled keeps false announcements cheap.
        spare: additional bytes of memory for a derived parser.
    """

    __slots__ = (
        "_allocate",
        "_end",
        "_frame",
        "_limits",
        "_most",
        "_start",
        "_target",
        "_view",
        "_wanted",
    )

    def __init__(
        self,
        limits: Limits | None = None,
        allocate: Callable[[int], Buffer] = bytearray,
        *,
        spare: int = 0,
    ) -> None:
        self._limits = limits or LIMITS
        self._allocate = allocate
        # Larger frames and descriptors are received into memory of their own.
        self._most = READ_SIZE
        # Most connections carry small frames only, which need the first of its pages.
        self._view = memoryview(on_demand(READ_SIZE + spare))
        self._start = 0
        self._end = 0
        # An incomplete frame whose header is known, and the memory that is being filled.
        self._frame: _Unfinished | None = None
        self._target: memoryview | None = None
        self._wanted = 0

    def space(self) -> memoryview:
        """Memory for the next bytes. Never empty."""
        if self._target is not None:
            return self._target
        if self._end == 0:
            return self._view
        return self._view[self._end :]

    def received(self, count: int) -> list[Frame]:
        """Take ``count`` bytes in :meth:`space`. Returns the frames that they complete, in order.

        Raises:
            ProtocolError: a frame is invalid or exceeds the limits. Nothing after it can be parsed.
        """
        frames: list[Frame] = []
        if self._target is not None:
            if count < len(self._target):
                self._target = self._target[count:]
                return frames
            self._target = None
            unfinished = self._frame
            assert unfinished is not None
            if not self._advance(unfinished, frames):
                return frames
        else:
            self._end += count
        self._parse(frames)
        return frames

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """:meth:`received` for bytes in other memory."""
        frames: list[Frame] = []
        rest = memoryview(data)
        while rest:
            space = self.space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            rest = rest[count:]
            frames += self.received(count)
        return frames

    def is_between_frames(self) -> bool:
        """Whether the last frame is complete, so that the stream may end here."""
        return self._frame is None and self._start == self._end

    def _parse(self, frames: list[Frame]) -> None:
        view, start, end = self._view, self._start, self._end
        unpack, size = HEADER.unpack_from, HEADER.size
        while end - start >= size:
            length, kind, flags, buffers, call, time_left, _ = unpack(view, start)
            if length > self._limits.payload or buffers > self._limits.buffers:
                self._refuse(length, buffers)
            body = start + size + buffers * DESCRIPTOR.size
            if buffers or body + length - start > self._most:
                if end < body and body - start <= self._most:
                    break
                self._start, self._end = start, end
                if not self._begin(frames, kind, flags, call, time_left, length, buffers, size):
                    return
                start, end = self._start, self._end
                continue
            stop = body + length
            if stop > end:
                break
            payload = bytes(view[body:stop]) if length else b""
            frames.append(Frame(kind, flags, call, time_left, payload, ()))
            start = stop
        if start == end:
            start = end = 0
        elif start and len(view) - end < len(view) // 2:
            # Move the rest to the front, so that there is always room for more.
            view[: end - start] = bytes(view[start:end])
            start, end = 0, end - start
        self._start, self._end = start, end

    def _refuse(self, length: int, buffers: int) -> None:
        raise ProtocolError(
            f"received a frame of {length} bytes with {buffers} buffers, but the limits are {self._limits.payload} bytes"
            f" and {self._limits.buffers} buffers: the peer is another program, or the data was damaged"
        )

    def _begin(
        self,
        frames: list[Frame],
        kind: int,
        flags: int,
        call: int,
        time_left: int,
        length: int,
        buffers: int,
        size: int,
    ) -> bool:
        """Start a frame with buffers, or one too large for the parser's memory. True if it is already complete."""
        unfinished = _Unfinished(kind, flags, call, time_left, length)
        self._start += size
        if buffers * DESCRIPTOR.size > self._most - size:
            # Too many descriptors for the parser's memory: receive them like a payload.
            unfinished.descriptors = bytearray(buffers * DESCRIPTOR.size)
            unfinished.parts.append(memoryview(unfinished.descriptors))
        else:
            stop = self._start + buffers * DESCRIPTOR.size
            self._describe(unfinished, self._view[self._start : stop])
            self._start = stop
        return self._advance(unfinished, frames)

    def _describe(self, unfinished: _Unfinished, descriptors: memoryview) -> None:
        total = 0
        for size, offset, segment, slot in DESCRIPTOR.iter_unpack(descriptors):
            total += size
            if total > self._limits.buffer:
                raise ProtocolError(
                    f"received a frame with {total} bytes in buffers, but the limit is {self._limits.buffer}"
                )
            unfinished.described.append((size, offset, segment, slot))
        # The payload first, then the inline buffers.
        length = unfinished.length
        if length > READ_SIZE:
            unfinished.payload = memoryview(self._memory(length)).cast("B")[:length]
        else:
            unfinished.payload = bytearray(length)
        if length:
            unfinished.parts.append(memoryview(unfinished.payload))
        unfinished.parts_left = [each for each in unfinished.described if each[2] == INLINE]

    def _advance(self, unfinished: _Unfinished, frames: list[Frame]) -> bool:
        """Fill the frame's memory from the parser's. False if more data is needed."""
        self._frame = unfinished
        while True:
            while unfinished.parts:
                part = unfinished.parts.pop(0)
                count = min(len(part), self._end - self._start)
                if count:
                    part[:count] = self._view[self._start : self._start + count]
                    self._start += count
                if count < len(part):
                    self._start = self._end = 0
                    self._target = part[count:]
                    return False
            if unfinished.descriptors is not None:
                descriptors, unfinished.descriptors = unfinished.descriptors, None
                self._describe(unfinished, memoryview(descriptors))
                continue
            if not unfinished.parts_left:
                break
            size = unfinished.parts_left.pop(0)[0]
            memory = self._memory(size)
            unfinished.inline.append(memory)
            if size:
                unfinished.parts.append(memoryview(memory).cast("B")[:size])
        self._frame = None
        inline = iter(unfinished.inline)
        frames.append(
            Frame(
                unfinished.kind,
                unfinished.flags,
                unfinished.call,
                unfinished.time_left,
                unfinished.payload,
                [
                    next(inline) if segment == INLINE else Shared(segment, slot, offset, size)
                    for size, offset, segment, slot in unfinished.described
                ],
            )
        )
        return True

    def _memory(self, size: int) -> Buffer:
        try:
            return self._allocate(size)
        except (MemoryError, OSError) as error:
            raise ProtocolError(
                f"cannot allocate {size} bytes for one buffer of a message ({str(error) or 'no memory'}): send less at once"
            ) from None


class _Unfinished:
    """An incomplete frame whose header is known; ``parts`` are filled in order."""

    __slots__ = (
        "call",
        "described",
        "descriptors",
        "flags",
        "inline",
        "kind",
        "length",
        "parts",
        "parts_left",
        "payload",
        "time_left",
    )

    def __init__(self, kind: int, flags: int, call: int, time_left: int, length: int) -> None:
        self.kind = kind
        self.flags = flags
        self.call = call
        self.time_left = time_left
        self.length = length
        self.payload: bytearray | memoryview = bytearray()
        self.descriptors: bytearray | None = None
        self.described: list[tuple[int, int, int, int]] = []
        self.parts: list[memoryview] = []
        self.parts_left: list[tuple[int, int, int, int]] = []
        self.inline: list[Buffer] = []
