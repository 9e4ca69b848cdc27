"""Reusable memory for large received buffers: fresh pages cost more than copying the bytes.

A copy into pages that the process has not touched yet is several times slower, because the kernel must find and
clear each page first. So when a tensor that was received over a socket is freed, its memory is kept for the next one.
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

from .buffers import on_demand


# Smaller ones come from malloc, which reuses memory itself.
LEAST = 256 * 1024
# Four size classes per power of two: at most a fifth is wasted.
_STEPS = 4


def size_class(size: int) -> int:
    """The number of bytes reserved for ``size`` bytes."""
    power = 1 << max(size - 1, 1).bit_length()
    step = max(power // (2 * _STEPS), 4096)
    return -(-size // step) * step


@cache
def _array_class(room: int) -> Any:
    """One class per size class, because ctypes never frees them."""
    return ctypes.c_char * room


class Recycler:
    """Lends memory, and takes it back when the last view of it is gone.

    Args:
        keep: the most bytes that are kept for later.
        on_use: called whenever memory is lent. The callee arranges a later call of :meth:`trim`.
    """

    def __init__(self, keep: int = 1 << 30, on_use: Callable[[], None] = lambda: None) -> None:
        self._keep = keep
        self._on_use = on_use
        self._lock = threading.Lock()
        # By size, with the time at which it came back; the oldest first.
        self._free: dict[int, list[tuple[float, mmap.mmap]]] = {}
        self._kept = 0
        # Counted without a lock: it only tells whether any memory is lent.
        self._lent = 0

    def allocate(self, size: int) -> Any:
        """Writable memory of ``size`` bytes. It may contain earlier data."""
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
            memory = on_demand(room)
        self._lent += 1
        lent = _array_class(room).from_buffer(memory)
        weakref.finalize(lent, self._take_back, memory, room).atexit = False
        return memoryview(lent).cast("B")[:size]

    def _take_back(self, memory: mmap.mmap, room: int) -> None:
        self._lent -= 1
        # Called by the thread that drops the last reference, perhaps in a garbage collection while that thread
        # holds our lock. Then the memory is not kept.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._kept + room <= self._keep:
                self._free.setdefault(room, []).append((time.monotonic(), memory))
                self._kept += room
        finally:
            self._lock.release()

    def trim(self, before: float) -> float | None:
        """Free memory that has been unused since before this time (monotonic seconds).

        Returns:
            since when the oldest of the rest has been unused; None if there is none.
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
        """Whether any lent memory is in use."""
        return self._lent > 0

    @property
    def kept(self) -> int:
        """Bytes that are kept for later."""
        return self._kept

    def clear(self) -> None:
        """Free all memory that is kept for later."""
        with self._lock:
            self._free.clear()
            self._kept = 0
