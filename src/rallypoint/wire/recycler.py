"""Memory for large buffers that are received, used again: fresh pages cost more than the bytes.

A copy into pages that the process has not touched yet runs at a fraction of the speed of one into pages that
it has: the kernel must find and clear each first. So what a tensor that came over a socket has lived in is kept
for the next one when the tensor is freed.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any


# Smaller ones are malloc's: it recycles them itself.
LEAST = 256 * 1024
# Four sizes between one power of two and the next: at most a fifth is wasted.
_STEPS = 4


def size_class(size: int) -> int:
    """What is reserved for ``size`` bytes."""
    power = 1 << max(size - 1, 1).bit_length()
    step = max(power // (2 * _STEPS), 4096)
    return -(-size // step) * step


@cache
def _array_class(room: int) -> Any:
    """A class per size class: ctypes keeps each for ever."""
    return ctypes.c_char * room


class Recycler:
    """Lends memory; takes it back when the last view of it is gone.

    Args:
        keep: bytes that are kept for later at most.
        on_use: called whenever memory is lent; :meth:`give_back` is to be called some time after that.
    """

    def __init__(self, keep: int = 1 << 30, on_use: Callable[[], None] = lambda: None) -> None:
        self._keep = keep
        self._on_use = on_use
        self._lock = threading.Lock()
        # By size; with when it came back, in that order.
        self._free: dict[int, list[tuple[float, mmap.mmap]]] = {}
        self._kept = 0
        # Only to know whether any is: counted without a lock.
        self._lent = 0

    def allocate(self, size: int) -> Any:
        """Writable memory of ``size`` bytes, that may hold what was there before."""
        if size < LEAST:
            return bytearray(size)
        room = size_class(size)
        self._on_use()
        with self._lock:
            free = self._free.get(room)
            memory = free.pop()[1] if free else None
            if memory is not None:
                self._kept -= room
        if memory is None:
            memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._lent += 1
        lent = _array_class(room).from_buffer(memory)
        weakref.finalize(lent, self._take_back, memory, room).atexit = False
        return memoryview(lent).cast("B")[:size]

    def _take_back(self, memory: mmap.mmap, room: int) -> None:
        self._lent -= 1
        # Called by whoever drops the last reference, perhaps inside a collection that our own lock's holder
        # has set off: then it is simply not kept.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._kept + room <= self._keep:
                self._free.setdefault(room, []).append((time.monotonic(), memory))
                self._kept += room
        finally:
            self._lock.release()

    def give_back(self, before: float) -> float | None:
        """Give the system what has waited for use since before this time (monotonic seconds).

        Returns:
            since when the oldest of the rest has waited.
        """
        oldest: float | None = None
        with self._lock:
            for room, waiting in self._free.items():
                left = [each for each in waiting if each[0] >= before]
                self._kept -= room * (len(waiting) - len(left))
                waiting[:] = left
                if left and (oldest is None or left[0][0] < oldest):
                    oldest = left[0][0]
        return oldest

    @property
    def has_lent(self) -> bool:
        """Whether memory of it is in use."""
        return self._lent > 0

    @property
    def kept(self) -> int:
        """Bytes that wait for use."""
        return self._kept

    def clear(self) -> None:
        """Give back to the system what nobody uses."""
        with self._lock:
            self._free.clear()
            self._kept = 0
