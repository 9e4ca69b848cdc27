"""What a rank keeps in each step for the process that takes it over: a few KB in shared memory that outlives the process.

The memory is an anonymous file that the supervisor holds, too. It begins with the worker's progress
(:mod:`rallypoint._core.progress`). Two slots follow, written in turn, so that one is complete whenever the process is killed.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib

from rallypoint._core import linux, progress
from rallypoint.errors import ElasticError


# Bytes of one slot. Both slots, and what comes before them, end before the first snapshot (:mod:`.slots`).
SLOT = 384 * 1024
# Sequence number, length, then the checksum of both and the data.
_HEAD = struct.Struct("!QII")
_SIZE = progress.SIZE + 2 * SLOT


def newest(slots: list[bytes]) -> tuple[int, bytes] | None:
    """The newest complete slot.

    Args:
        slots: the contents of each: a header, then data.
    Returns:
        Its number and its data; None if no slot is complete.
    """
    found: tuple[int, bytes] | None = None
    for slot in slots:
        number, size, checksum = _HEAD.unpack_from(slot)
        data = slot[_HEAD.size : _HEAD.size + size]
        is_whole = number and len(data) == size and checksum == _checksum(number, data)
        if is_whole and (found is None or number > found[0]):
            found = number, data
    return found


def newest_in(fd: int, base: int) -> bytes | None:
    """The newest data in a memory; None if there is none."""
    data = os.pread(fd, 2 * SLOT, base + progress.SIZE)
    if len(data) < 2 * SLOT:
        return None
    found = newest([data[:SLOT], data[SLOT:]])
    return None if found is None else found[1]


def erase(fd: int, base: int) -> None:
    """Forget the data in a memory."""
    for at in (base + progress.SIZE, base + progress.SIZE + SLOT):
        if os.fstat(fd).st_size >= at + _HEAD.size:
            os.pwrite(fd, bytes(_HEAD.size), at)


def grow(fd: int, size: int) -> None:
    """Make a file at least this long, in bytes. Other threads may make it longer at the same time.

    (``ftruncate`` with an outdated size would cut off what they have mapped: they would get a SIGBUS.)
    """
    if os.fstat(fd).st_size < size:
        os.pwrite(fd, b"\0", size - 1)


def packed(number: int, data: bytes) -> bytes:
    """A slot: number (from 1 on), data."""
    return _HEAD.pack(number, len(data), _checksum(number, data)) + data


def _checksum(number: int, data: bytes) -> int:
    return zlib.crc32(data, number & 0xFFFFFFFF)


class Memory:
    """One rank's memory.

    Args:
        fd: of the file, from the supervisor; None creates one.
        base: where the memory begins in it. At bases other than 0 are copies of other ranks' memory (:mod:`.guests`).
    """

    def __init__(self, fd: int | None = None, base: int = 0) -> None:
        self.fd = linux.memfd_create("rally-session", linux.MFD_CLOEXEC) if fd is None else fd
        self._owns = base == 0
        grow(self.fd, base + _SIZE)
        self._map = mmap.mmap(self.fd, _SIZE, offset=base)
        self.progress = progress.Progress(self._map)
        start = progress.SIZE
        held = newest([self._map[start : start + SLOT], self._map[start + SLOT :]])
        self._number = 0 if held is None else held[0]
        self.held = None if held is None else held[1]

    def keep(self, data: bytes) -> None:
        """Replace the older slot.

        Raises:
            ElasticError: the data does not fit into a slot.
        """
        number = self._number + 1
        slot = packed(number, data)
        if len(slot) > SLOT:
            raise ElasticError(
                f"a rank's own state is {len(slot):,} bytes, at most {SLOT:,} are kept"
            )
        start = progress.SIZE + (number % 2) * SLOT
        self._map[start : start + len(slot)] = slot
        self._number = number

    def close(self) -> None:
        """Release it; the supervisor's descriptor stays open."""
        self._map.close()
        if self._owns:
            os.close(self.fd)
