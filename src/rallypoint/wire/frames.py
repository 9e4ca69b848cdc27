"""Frames: how messages follow one another on a stream of bytes. No I/O.

A frame is a header, descriptors of its buffers, a payload, and then those buffers that travel inline::

    header      24 bytes   payload length u32, kind u8, flags u8, number of buffers u16,
                           call u64, time left u32 (ms, 0: no limit), spare u32
    descriptor  24 bytes   size u64, offset u64, segment u32 (INLINE: follows below), slot u32
    payload                what the codec made: a pickle, or nothing
    buffers                the inline ones, in order

Large buffers and payloads are received straight into memory of their own, which ``allocate`` gives: the bytes of a
tensor are copied once, by the kernel.

Integers are little-endian. A header that breaks a limit ends the connection (``ProtocolError``): after it no
boundary between frames can be trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rallypoint.errors import MessageTooLarge, ProtocolError


HEADER = struct.Struct("<IBBHQII")
DESCRIPTOR = struct.Struct("<QQII")
INLINE = 0xFFFFFFFF
# How much is read at once. Larger ones bring nothing on a Unix socket, whose own buffer is 208 KiB.
READ_SIZE = 256 * 1024
MAX_TIME_LEFT = 0xFFFFFFFF

# Anything with the buffer protocol.
Buffer = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a peer may send.

    Args:
        payload: bytes of one payload, without tensors.
        buffers: how many buffers one frame may have.
        buffer: bytes of all buffers of one frame.
    """

    payload: int = 1 << 30
    buffers: int = 1 << 14
    buffer: int = 1 << 40


# What every end takes, and so the most that any may send (:func:`check`).
LIMITS = Limits()


class Shared(NamedTuple):
    """A buffer that lies in shared memory."""

    segment: int
    slot: int
    offset: int
    size: int


class Frame(NamedTuple):
    """A frame that has come.

    Args:
        time_left: milliseconds that the caller still waits, 0 without a limit.
        buffers: received bytes, or where they lie in shared memory.
    """

    kind: int
    flags: int
    call: int
    time_left: int
    payload: bytes | bytearray | memoryview
    buffers: Sequence[Buffer | Shared]


def check(payload: int, buffers: Sequence[memoryview]) -> None:
    """Whether a frame with a payload of so many bytes, and these buffers, is taken by the other end.

    Raises:
        MessageTooLarge: it is not.
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
    """The first bytes of a frame whose payload has so many bytes."""
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
    """A frame as pieces to be sent one after the other.

    Args:
        buffers: bytes to be sent along, or where the receiver finds them.
        time_left: milliseconds; more than 49 days are sent as that.
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
    """Takes bytes as they come, gives frames.

    The owner receives into :meth:`space` and then says how many bytes came (:meth:`received`).

    Args:
        limits: what the peer may send; ``LIMITS`` by default.
        allocate: memory of at least so many bytes, writable; a bytearray by default. It is asked for what a peer
            has only announced: memory that is taken as it is filled keeps a false claim cheap.
        spare: bytes of memory beyond what frames need, for a parser that derives from this one.
    """

    __slots__ = (
        "_allocate",
        "_buffer",
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
        # Longer frames, and longer descriptors, get memory of their own.
        self._most = READ_SIZE
        self._buffer = bytearray(READ_SIZE + spare)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        # A frame whose head is known and whose rest is on its way, and the memory that is being filled.
        self._frame: _Unfinished | None = None
        self._target: memoryview | None = None
        self._wanted = 0

    def space(self) -> memoryview:
        """Where the next bytes belong. Never empty."""
        if self._target is not None:
            return self._target
        if self._end == 0:
            return self._view
        return self._view[self._end :]

    def received(self, count: int) -> list[Frame]:
        """Frames that ``count`` more bytes in :meth:`space` complete, in order.

        Raises:
            ProtocolError: this is no frame, or one beyond the limits; nothing after it can be understood.
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
        """The same for bytes that lie elsewhere."""
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
        """Whether nothing of a further frame has come: the stream may end here."""
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
            # What is there moves to the front, so that there is always room for more.
            view[: end - start] = bytes(view[start:end])
            start, end = 0, end - start
        self._start, self._end = start, end

    def _refuse(self, length: int, buffers: int) -> None:
        raise ProtocolError(
            f"a frame of {length} bytes with {buffers} buffers: at most {self._limits.payload} bytes"
            f" and {self._limits.buffers} buffers are taken; is this another program, or damage?"
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
        """A frame with buffers, or one too long for our own memory. True if all of it was there."""
        unfinished = _Unfinished(kind, flags, call, time_left, length)
        self._start += size
        if buffers * DESCRIPTOR.size > self._most - size:
            # The descriptors alone are too long: filled like a payload, then read.
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
                    f"a frame with {total} bytes in buffers: at most {self._limits.buffer} are taken"
                )
            unfinished.described.append((size, offset, segment, slot))
        # The payload first, then what is inline.
        length = unfinished.length
        if length > READ_SIZE:
            unfinished.payload = memoryview(self._memory(length)).cast("B")[:length]
        else:
            unfinished.payload = bytearray(length)
        if length:
            unfinished.parts.append(memoryview(unfinished.payload))
        unfinished.parts_left = [each for each in unfinished.described if each[2] == INLINE]

    def _advance(self, unfinished: _Unfinished, frames: list[Frame]) -> bool:
        """Fill the frame's memory from what is there; False if more must come first."""
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
                f"a frame announces {size} bytes in one piece, and this process cannot have them: {str(error) or 'no memory'};"
                " send less at once"
            ) from None


class _Unfinished:
    """A frame whose head is known; ``parts`` are to be filled in order."""

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
