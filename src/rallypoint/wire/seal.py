"""A stream of bytes protected against changes in transit: cut into records, each with a MAC. No I/O.

Theory of operation
-------------------
A record is the length of its content (u32, little endian), the content, and a tag of 16 bytes. The contents of all
records in sequence are the stream of frames (``frames.py``). The boundaries between records have no meaning.

The tag is a keyed BLAKE2b (RFC 7693) over the record's number, its length and its content. Numbers are counted, not sent,
and each direction of each connection has its own keys. So a record is rejected if it was changed, moved, repeated or
left out, or comes from the other direction or another connection. For a long content, the tag covers a short value
computed from it with a second key, which is faster (``bulk.py``). With GMAC and Poly1305 that value is a universal hash,
encrypted with the record's number as a nonce that is never reused; SHA-256 resists collisions. Either way, another content
with the same tag would require a forgery of one of the two. The length, which the tag covers, determines which one is used.

No received data is used before its tag is verified, except the length of a record, which is at most ``MOST``: no memory
is allocated for it. The bytes of a large tensor are received directly into their own memory, as announced by the
verified header of their frame, and used only once the tag after them is verified.

Others on the network can still read everything, block it, or end the connection. The keys are derived from the
transcript of the handshake, which protects itself (``auth.py``).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint._core.secret import derive
from rallypoint.errors import FrameChanged, ProtocolError

from . import bulk
from .buffers import address_of
from .frames import Buffer, Frame, FrameParser, Limits
from .line import Piece


LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<QI")
TAG_BYTES: Final = 16
OVERHEAD: Final = LENGTH.size + TAG_BYTES
# The most bytes of content in a record. With more, it would not stay in a core's cache until it is sent.
MOST: Final = 768 * 1024
_PAGE: Final = 4096
# Memory of up to this many bytes comes from malloc, which reuses it without clearing pages.
_MODERATE: Final = 96 * 1024
# Up to this many bytes, BLAKE2b alone is faster than with a bulk value.
SHORT: Final = 4096


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """The MAC keys of one direction of a connection.

    Args:
        bulk: one of ``bulk.available()``.
    """

    short: bytes
    long: bytes
    bulk: str

    @classmethod
    def of(cls, secret: bytes, name: str, direction: str, transcript: Sequence[bytes]) -> Keys:
        """Derive the keys from a handshake.

        Args:
            secret: the job's.
            name: one of ``bulk.available()``, which both ends have agreed on.
            direction: the sending end.
            transcript: the messages of the handshake, unique to this connection.
        """
        key = derive(secret, "rpc channel", name, direction, *transcript)
        return cls(
            derive(key, "short records"),
            derive(key, "long records"),
            name,
        )


class Seal:
    """Computes the tags of one direction, in order. Not thread-safe."""

    __slots__ = ("_bulk", "_hash", "_keys", "_number")

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._hash = hashlib.blake2b(key=keys.short, digest_size=TAG_BYTES)
        # Created when first needed: most connections never send long records.
        self._bulk: bulk.Bulk | None = None
        self._number = 0

    def tag(self, content: Piece) -> bytes:
        """The tag of the next record."""
        size = len(content)
        if size > SHORT:
            self.begin()
            self.update(memoryview(content))
            return self.finish(size)
        signed = self._hash.copy()
        signed.update(_NUMBER.pack(self._number, size))
        signed.update(content)
        self._number += 1
        return signed.digest()

    def begin(self) -> None:
        """Start a long record, whose content follows in parts."""
        if self._bulk is None:
            self._bulk = bulk.new(self._keys.bulk, self._keys.long)
        self._bulk.begin(self._number)

    def update(self, part: memoryview) -> None:
        assert self._bulk is not None
        self._bulk.update(part)

    def finish(self, size: int) -> bytes:
        """The tag of the long record, which has this many bytes."""
        assert self._bulk is not None
        signed = self._hash.copy()
        signed.update(_NUMBER.pack(self._number, size))
        signed.update(self._bulk.finish())
        self._number += 1
        return signed.digest()


class Sealer:
    """Makes records.

    Args:
        keys: those of this direction.
        allocate: returns writable memory of at least this many bytes, for large records.
    """

    __slots__ = ("_allocate", "_at", "_memory", "_seal")

    def __init__(self, keys: Keys, allocate: Callable[[int], Buffer] = bytearray) -> None:
        self._seal = Seal(keys)
        self._allocate = allocate
        self._memory = memoryview(b"")
        self._at = 0  # its address

    def short(self, content: Piece) -> bytes:
        """A record of at most ``SHORT`` bytes."""
        return b"".join((LENGTH.pack(len(content)), content, self._seal.tag(content)))

    def long(self, parts: Sequence[memoryview]) -> memoryview:
        """A record of at most ``MOST`` bytes in all, which is valid until the next call.

        The parts are copied first, so that the tag matches even if their owner writes to them meanwhile.
        """
        size = sum(map(len, parts))
        room = size + OVERHEAD + _PAGE
        if room > len(self._memory):
            if room > _MODERATE:
                # The first one of a large message, in most cases. Fresh pages cost more than the rest of a record.
                self._memory = memoryview(self._allocate(MOST + OVERHEAD + _PAGE))
            else:
                self._memory = memoryview(bytearray(room))
            self._at = address_of(self._memory)
        # A copy is up to eight times slower if, within a page, it writes a little behind where it reads: processors compare
        # the lower 12 bits of addresses first. So these are made equal.
        start = (address_of(parts[0]) - self._at - LENGTH.size) % _PAGE
        record, end = self._memory[start:], LENGTH.size
        for each in parts:
            record[end : end + len(each)] = each
            end += len(each)
        LENGTH.pack_into(record, 0, size)
        record[end : end + TAG_BYTES] = self._seal.tag(record[LENGTH.size : end])
        return record[: end + TAG_BYTES]

    def release(self) -> None:
        """Release the memory for long records, while none is being sent."""
        self._memory = memoryview(b"")


class SealedParser(FrameParser):
    """A :class:`FrameParser` for the records of a :class:`Sealer`.

    Its memory holds verified data of an incomplete frame, followed by data that is not verified yet. While a frame's own
    memory is being filled, records that fit into the rest of it are received there.

    Args:
        keys: those of the other end's direction.
        limits, allocate: as for :class:`FrameParser`.
    """

    __slots__ = ("_behind", "_came", "_num_behind", "_rest", "_room", "_seal", "_size")

    def __init__(
        self,
        keys: Keys,
        limits: Limits | None = None,
        allocate: Callable[[int], Buffer] = bytearray,
    ) -> None:
        super().__init__(limits, allocate, spare=MOST + OVERHEAD)
        self._seal = Seal(keys)
        # Start and end of the data in the parser's memory that is not verified yet.
        self._rest = self._came = 0
        # A record that is being received into a frame's memory: the place of its next bytes, and its size.
        self._room: memoryview | None = None
        self._size = 0
        # Its tag and the next record's length, and how many bytes of these have been received.
        self._behind = memoryview(bytearray(OVERHEAD))
        self._num_behind = -1

    def space(self) -> memoryview:
        if self._num_behind >= 0:
            return self._behind[self._num_behind :]
        if self._room is not None:
            return self._room
        return self._view[self._came :]

    def received(self, count: int) -> list[Frame]:
        """Like :meth:`FrameParser.received`.

        Raises:
            FrameChanged: the data was altered in transit.
        """
        frames: list[Frame] = []
        if self._num_behind >= 0:
            self._num_behind += count
            self._end_in_place(frames)
        elif self._room is not None:
            self._seal.update(self._room[:count])
            self._room = self._room[count:]
            if not self._room:
                self._room, self._num_behind = None, 0
        else:
            self._came += count
            self._open(frames)
        return frames

    @property
    def is_amid_buffer(self) -> bool:
        """Whether a frame's own memory is being filled."""
        return self._target is not None

    def is_between_frames(self) -> bool:
        return (
            super().is_between_frames()
            and self._rest == self._came
            and self._room is None
            and self._num_behind < 0
        )

    def _open(self, frames: list[Frame]) -> None:
        """Take the complete records. Start an incomplete one that can be received into a frame's memory."""
        view, start, end = self._view, self._rest, self._came
        while end - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(view, start)
            if size > MOST:
                raise _changed()
            content = start + LENGTH.size
            stop = content + size
            if stop + TAG_BYTES > end:
                if self._target is not None and SHORT < size <= len(self._target):
                    self._rest, self._came = start, end
                    self._begin_in_place(size)
                    return
                break
            found = self._seal.tag(view[content:stop])
            if not hmac.compare_digest(found, view[stop : stop + TAG_BYTES]):
                raise _changed()
            start = stop + TAG_BYTES
            self._deliver(content, stop, frames)
        if start == end:
            start = end = self._end
        if len(view) - start < MOST + OVERHEAD:
            # Move all to the front: there must be room for the rest of the record.
            self._to_front()
            view[self._end : self._end + end - start] = bytes(view[start:end])
            start, end = self._end, self._end + end - start
        self._rest, self._came = start, end

    def _to_front(self) -> None:
        """Move verified data of an incomplete frame to the front."""
        if self._start:
            pending = bytes(self._view[self._start : self._end])
            self._view[: len(pending)] = pending
            self._start, self._end = 0, len(pending)

    def _deliver(self, start: int, stop: int, frames: list[Frame]) -> None:
        """Pass on the verified data between these positions."""
        view = self._view
        while self._target is not None and start < stop:
            count = min(len(self._target), stop - start)
            self._target[:count] = view[start : start + count]
            start += count
            frames += super().received(count)
        if start == stop:
            return
        if self._start == self._end:
            self._start, self._end = start, stop
        else:
            self._to_front()
            view[self._end : self._end + stop - start] = bytes(view[start:stop])
            self._end += stop - start
        self._parse(frames)

    # -- a record in a frame's own memory --------------------------------------------------------

    def _begin_in_place(self, size: int) -> None:
        """Move the received part of the record at ``_rest`` into the frame's memory, where the rest follows."""
        target = self._target
        assert target is not None
        start = self._rest + LENGTH.size
        count = min(size, self._came - start)
        self._seal.begin()
        self._size = size
        if count:
            target[:count] = self._view[start : start + count]
            self._seal.update(target[:count])
        self._room = target[count:size] if count < size else None
        if self._room is None:
            # A part of its tag was received, too.
            left = self._came - start - count
            self._behind[:left] = self._view[start + count : self._came]
            self._num_behind = left
        self._rest = self._came = self._end

    def _end_in_place(self, frames: list[Frame]) -> None:
        """Use what was received of a record's tag and the next length, or of a length alone."""
        if self._size:
            if self._num_behind < TAG_BYTES:
                return
            found = self._seal.finish(self._size)
            if not hmac.compare_digest(found, self._behind[:TAG_BYTES]):
                raise _changed()
            size, self._size = self._size, 0
            frames += super().received(size)
        if self._target is not None and self._num_behind == OVERHEAD:
            (size,) = LENGTH.unpack_from(self._behind, TAG_BYTES)
            if SHORT < size <= min(MOST, len(self._target)):
                self._num_behind = -1
                self._seal.begin()
                self._size, self._room = size, self._target[:size]
                return
        elif self._target is not None:
            return  # the length is not complete
        # The next record is received into the parser's memory.
        left = self._num_behind - TAG_BYTES
        self._num_behind = -1
        self._rest, self._came = self._end, self._end + left
        self._view[self._rest : self._came] = self._behind[TAG_BYTES : TAG_BYTES + left]
        self._open(frames)


def _changed() -> ProtocolError:
    return FrameChanged(
        "data was altered in transit: someone on the network changes packets, or hardware damages them; the connection was"
        " closed, and the next call opens a new one"
    )
