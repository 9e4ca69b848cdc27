"""How far a worker of a session has got: numbers at the start of its memory, which its supervisor reads without asking.

For each process group, this is how many collectives the worker has started in it. A stuck worker has started fewer than
those that wait for it. The counts restart at certain places, for example after a loss. Each worker reaches these in its
own time, so the number of the last such place is kept beside the counts: counts from different places cannot be compared.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from mmap import mmap


# Bytes of the memory that are used for this.
SIZE = 1024
# One group: its key (0: none), and how many collectives were started.
_ENTRY = struct.Struct("=QQ")
# In place of a group's key: the number of the place from which the worker counts.
COUNTED_FROM = (1 << 64) - 1


def key_of(group: str) -> int:
    """The key of a group, by its name; the same in all its members."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=7).digest()) + 1


def read(fd: int) -> dict[int, int]:
    """The collectives that the worker with this memory has started, by the key of their group, and :data:`COUNTED_FROM`."""
    found = _ENTRY.iter_unpack(os.pread(fd, SIZE, 0))
    return {key: begun for key, begun in found if key}


def collectives(fd: int) -> int:
    """How many collectives the worker with this memory has started, in all groups together."""
    return sum(begun for key, begun in read(fd).items() if key != COUNTED_FROM)


class Progress:
    """The worker's side.

    Args:
        memory: where the counts are written: its first :data:`SIZE` bytes.
    """

    def __init__(self, memory: mmap) -> None:
        self._memory = memory
        self._begun: dict[str, list[int]] = {}  # group -> its place, its key, its collectives
        self.restart((), 0)

    def restart(self, groups: Iterable[str], place: int) -> None:
        """Count from 0, at the same place of the program in all members.

        Args:
            groups: those to count; any beyond the 63rd are not counted.
            place: the place's number, greater than that of the place before.
        """
        self._begun.clear()
        self._memory[:SIZE] = bytes(SIZE)
        _ENTRY.pack_into(self._memory, 0, COUNTED_FROM, place)
        for at, group in zip(range(_ENTRY.size, SIZE, _ENTRY.size), groups, strict=False):
            self._begun[group] = [at, key_of(group), 0]
            _ENTRY.pack_into(self._memory, at, *self._begun[group][1:])

    def begin(self, group: str) -> None:
        """Count a collective of this group that starts."""
        entry = self._begun.get(group)
        if entry is not None:
            entry[2] += 1
            _ENTRY.pack_into(self._memory, *entry)
