"""A stream of bytes that nobody between its two ends can change: cut into records, each under a MAC. No I/O.

Theory of operation
-------------------
A record is the length of its content (u32, little endian), the content, and a tag of 16 bytes. The content of all records,
one after the other, is the stream of frames (``frames.py``); where one record ends and the next begins means nothing.

The tag is a keyed BLAKE2b (RFC 7693) over the number of the record in its direction, the length, and the content. So a record
that was changed, moved, repeated or left out, or one from the other direction or another connection, is refused: each
direction of each connection has keys of its own, and numbers are counted, not sent. Of a long content the tag signs a
short value instead, which is computed faster (``bulk.py``), under a second key. GMAC is a universal hash, encrypted with
the number as nonce, and no number is used twice; SHA-256 resists collisions. Either way, to find another content for a tag
takes a forgery of one of the two. Which of them is meant follows from the length, which both sign.

Nothing that has come is looked at before its tag is right, but for the length of a record, which is at most
``MOST``: nothing is allocated for it. The bytes of a large tensor are received straight into their own memory, which
the signed header of its frame has announced, and count only when the tag behind them is right.

Anybody on the way can still read everything, stop it, or end the connection. What was said before this begins is the
handshake's, whose transcript the keys are derived from (``auth.py``).
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
from .frames import Buffer, Frame, FrameParser, Limits
from .line import Piece


LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<QI")
TAG_BYTES: Final = 16
OVERHEAD: Final = LENGTH.size + TAG_BYTES
# Bytes of one record's content, at most.
MOST: Final = 256 * 1024
# Up to here BLAKE2b alone is faster than a bulk value and BLAKE2b.
SHORT: Final = 4096


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """What one direction of a connection is sealed with.

    Args:
        bulk: one of ``bulk.available()``.
    """

    short: bytes
    long: bytes
    bulk: str

    @classmethod
    def of(cls, secret: bytes, name: str, direction: str, transcript: Sequence[bytes]) -> Keys:
        """Those of a handshake.

        Args:
            secret: the job's.
            name: one of ``bulk.available()``, which both ends have agreed on.
            direction: who sends.
            transcript: all that was said, which no other connection has.
        """
        key = derive(secret, "rpc channel", name, direction, *transcript)
        return cls(
            derive(key, "short records"),
            derive(key, "long records")[: bulk.KEY_BYTES],
            name,
        )


class Seal:
    """The tags of one direction, one after the other. Not for several threads at once."""

    __slots__ = ("_bulk", "_hash", "_keys", "_number")

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._hash = hashlib.blake2b(key=keys.short, digest_size=TAG_BYTES)
        # Made when first needed: most connections carry calls only.
        self._bulk: bulk.Bulk | None = None
        self._number = 0

    def tag(self, content: Piece) -> bytes:
        """Of the next record."""
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
        """The next record is a long one; its content follows in parts."""
        if self._bulk is None:
            self._bulk = bulk.new(self._keys.bulk, self._keys.long)
        self._bulk.begin(self._number)

    def update(self, part: memoryview) -> None:
        assert self._bulk is not None
        self._bulk.update(part)

    def finish(self, size: int) -> bytes:
        """The tag of a long record of so many bytes."""
        assert self._bulk is not None
        signed = self._hash.copy()
        signed.update(_NUMBER.pack(self._number, size))
        signed.update(self._bulk.finish())
        self._number += 1
        return signed.digest()


class Sealer:
    """Makes records of what is sent."""

    __slots__ = ("_memory", "_seal")

    def __init__(self, keys: Keys) -> None:
        self._seal = Seal(keys)
        self._memory: memoryview | None = None

    def short(self, content: Piece) -> bytes:
        """A record with some bytes, ``SHORT`` at most."""
        return b"".join((LENGTH.pack(len(content)), content, self._seal.tag(content)))

    def long(self, parts: Sequence[memoryview]) -> memoryview:
        """A record with these, ``MOST`` bytes together at most. It is valid until the next call.

        They are copied first. So what is signed is what is sent, though their owner may be writing to them.
        """
        if self._memory is None:
            self._memory = memoryview(bytearray(MOST + OVERHEAD))
        record, end = self._memory, LENGTH.size
        for each in parts:
            record[end : end + len(each)] = each
            end += len(each)
        size = end - LENGTH.size
        LENGTH.pack_into(record, 0, size)
        record[end : end + TAG_BYTES] = self._seal.tag(record[LENGTH.size : end])
        return record[: end + TAG_BYTES]

    def release(self) -> None:
        """Give back the memory that long records take: none is being sent."""
        self._memory = None


class SealedParser(FrameParser):
    """A :class:`FrameParser` of what a :class:`Sealer` at the other end has made.

    The parser's memory holds first what was verified and belongs to a frame that is not complete, then what was not
    verified. While a frame's own memory is being filled, records that fit into what is left of it are received there.

    Args:
        keys: the other end's.
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
        # What came and is not verified: from the first to before the second, in the parser's memory.
        self._rest = self._came = 0
        # A record that is being received into a frame's memory: where its next bytes belong, and its size.
        self._room: memoryview | None = None
        self._size = 0
        # What comes behind it, its tag and the next one's length, and how much has come of that.
        self._behind = memoryview(bytearray(OVERHEAD))
        self._num_behind = -1

    def space(self) -> memoryview:
        if self._num_behind >= 0:
            return self._behind[self._num_behind :]
        if self._room is not None:
            return self._room
        return self._view[self._came :]

    def received(self, count: int) -> list[Frame]:
        """As :meth:`FrameParser.received`.

        Raises:
            FrameChanged: what came is not what the other end has sent.
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
        """Take the records that are whole; begin one that can be received where it belongs."""
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
            # All to the front: a record that has begun must have room for its end.
            self._to_front()
            view[self._end : self._end + end - start] = bytes(view[start:end])
            start, end = self._end, self._end + end - start
        self._rest, self._came = start, end

    def _to_front(self) -> None:
        """What was verified, and waits for the rest of its frame."""
        if self._start:
            pending = bytes(self._view[self._start : self._end])
            self._view[: len(pending)] = pending
            self._start, self._end = 0, len(pending)

    def _deliver(self, start: int, stop: int, frames: list[Frame]) -> None:
        """What lies there in the memory is verified."""
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
        """What has come of the record at ``_rest`` goes where it belongs, and the rest will."""
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
            # Of its tag, something has come, too, but not all.
            left = self._came - start - count
            self._behind[:left] = self._view[start + count : self._came]
            self._num_behind = left
        self._rest = self._came = self._end

    def _end_in_place(self, frames: list[Frame]) -> None:
        """Something has come of what follows a record, or of a length alone."""
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
            return  # the rest of the length follows alone
        # The next record is received as any.
        left = self._num_behind - TAG_BYTES
        self._num_behind = -1
        self._rest, self._came = self._end, self._end + left
        self._view[self._rest : self._came] = self._behind[TAG_BYTES : TAG_BYTES + left]
        self._open(frames)


def _changed() -> ProtocolError:
    return FrameChanged(
        "a frame was changed on the way: between the two workers is somebody who alters packets, or a device that damages them;"
        " the connection is given up, and the next call makes a new one"
    )
