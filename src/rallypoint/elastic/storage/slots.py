"""Snapshots in shared memory that outlives the worker: two slots of any size, written in turn.

They come after a rank's small own state in the same anonymous file (:mod:`.memory`), which the supervisor holds, too. The second
slot begins a terabyte after the first: the file is sparse, so each can grow in place.

A slot's header is cleared before its contents are written, and set afterwards. If a process is killed in between, the other slot
is intact. A checksum tells whether the contents are still those that were written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterable

import torch

from rallypoint.elastic.checksum import checksum

from .memory import grow
from .schedule import Held


FIRST = 1 << 20
STRIDE = 1 << 40
# Number, steps, bytes of the contents, their checksum; then the checksum of these four.
_HEAD = struct.Struct("=QQQQ")
_CHECK = struct.Struct("=I")
# Contents begin here, and each tensor in them at a multiple of ALIGNED.
CONTENTS = 64
ALIGNED = 64


def header(held: Held, size: int, checksum: int) -> bytes:
    """What a slot begins with, once it is complete."""
    head = _HEAD.pack(held.number, held.steps, size, checksum)
    return head + _CHECK.pack(zlib.crc32(head))


def read_header(data: bytes) -> tuple[Held, int, int] | None:
    """Snapshot, bytes, checksum; None if the slot is not complete."""
    head = data[: _HEAD.size]
    if len(data) < _HEAD.size + _CHECK.size:
        return None
    number, steps, size, checksum = _HEAD.unpack(head)
    if not number or _CHECK.unpack_from(data, _HEAD.size) != (zlib.crc32(head),):
        return None
    return Held(number, steps), size, checksum


class Slots:
    """The snapshots of one rank.

    Args:
        fd: of the rank's memory. Not closed here: it stays its owner's.
        base: where the memory begins in the file.
    """

    def __init__(self, fd: int, base: int = 0) -> None:
        self._fd = fd
        self._first = base + FIRST
        self._areas: list[mmap.mmap | None] = [None, None]
        self._held: list[Held | None] = [self._read(slot) for slot in (0, 1)]
        self._prepared = 0

    @staticmethod
    def is_written(fd: int, base: int) -> bool:
        """Whether there seems to be a snapshot."""
        begins = (base + FIRST + slot * STRIDE for slot in (0, 1))
        return any(read_header(os.pread(fd, CONTENTS, begin)) is not None for begin in begins)

    def check(self) -> tuple[Held, ...]:
        """The complete snapshots. Reads all of them."""
        self._held = [self._read(slot) for slot in (0, 1)]
        return tuple(sorted(each for each in self._held if each is not None))

    def write(self, held: Held, size: int, pieces: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Replace the older snapshot.

        Args:
            held: the new snapshot.
            size: bytes of the contents.
            pieces: where in the contents each piece begins, and its bytes (``[n]``, uint8).
        Raises:
            OSError: out of memory.
        """
        slot = self._older()
        size += -size % 8
        area = self._area(slot, CONTENTS + size)
        self._clear(slot)
        contents = torch.frombuffer(area, dtype=torch.uint8, offset=CONTENTS, count=size)
        for begin, piece in pieces:
            contents[begin : begin + piece.numel()].copy_(piece)
        head = header(held, size, checksum(contents.view(torch.int64)))
        area[: len(head)] = head
        self._held[slot] = held

    def prepare(self, size: int) -> memoryview:
        """Memory for contents from elsewhere, in place of the older snapshot, which is dropped.

        Args:
            size: in bytes, a multiple of 8.
        Raises:
            OSError: out of memory.
        """
        slot = self._older()
        area = self._area(slot, CONTENTS + size)
        self._clear(slot)
        self._prepared = slot
        return memoryview(area)[CONTENTS : CONTENTS + size]

    def complete(self, held: Held, size: int, expected: int) -> bool:
        """The memory is filled. Returns whether its checksum matches; if so, it counts as a snapshot."""
        area = self._area(self._prepared, CONTENTS + size)
        contents = torch.frombuffer(area, dtype=torch.int64, offset=CONTENTS, count=size // 8)
        if checksum(contents) != expected:
            return False
        head = header(held, size, expected)
        area[: len(head)] = head
        self._held[self._prepared] = held
        return True

    def place(self, held: Held) -> tuple[int, int, int]:
        """Where the contents of a complete snapshot begin in the file, their bytes, and their checksum."""
        begin = self._begin(self._held.index(held))
        read = read_header(os.pread(self._fd, CONTENTS, begin))
        assert read is not None
        return begin + CONTENTS, read[1], read[2]

    def _older(self) -> int:
        numbers = [0 if each is None else each.number for each in self._held]
        return numbers.index(min(numbers))

    def _begin(self, slot: int) -> int:
        return self._first + slot * STRIDE

    def read(self, held: Held) -> torch.Tensor:
        """The contents of a complete snapshot, in the memory itself (``[n]``, uint8; the caller must not keep it)."""
        slot = self._held.index(held)
        size = self._size(slot)
        area = self._area(slot, CONTENTS + size)
        return torch.frombuffer(area, dtype=torch.uint8, offset=CONTENTS, count=size)

    def drop_after(self, number: int) -> None:
        """Drop all newer snapshots."""
        for slot, each in enumerate(self._held):
            if each is not None and each.number > number:
                self._area(slot, CONTENTS)
                self._clear(slot)

    def close(self) -> None:
        """Release the mappings; the memory stays."""
        for slot in (0, 1):
            self._unmap(slot)

    def _clear(self, slot: int) -> None:
        area = self._areas[slot]
        assert area is not None
        self._held[slot] = None
        area[:CONTENTS] = bytes(CONTENTS)

    def _size(self, slot: int) -> int:
        found = read_header(os.pread(self._fd, CONTENTS, self._begin(slot)))
        return 0 if found is None else found[1]

    def _read(self, slot: int) -> Held | None:
        found = read_header(os.pread(self._fd, CONTENTS, self._begin(slot)))
        if found is None:
            return None
        held, size, expected = found
        area = self._area(slot, CONTENTS + size)
        contents = torch.frombuffer(area, dtype=torch.int64, offset=CONTENTS, count=size // 8)
        return held if checksum(contents) == expected else None

    def _area(self, slot: int, size: int) -> mmap.mmap:
        area = self._areas[slot]
        if area is None or len(area) < size:
            self._unmap(slot)
            size += -size % FIRST
            begin = self._begin(slot)
            grow(self._fd, begin + size)
            area = self._areas[slot] = mmap.mmap(self._fd, size, offset=begin)
        return area

    def _unmap(self, slot: int) -> None:
        area, self._areas[slot] = self._areas[slot], None
        if area is not None:
            # A connection that broke while it filled the area may hold it for a while.
            with contextlib.suppress(BufferError):
                area.close()
