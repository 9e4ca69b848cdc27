"""Copies of many bytes by several threads: one alone does not use what the memory can do.

The interpreter's lock is not held meanwhile. A copy is cut into pieces that become smaller and smaller (Polychronopoulos
and Kuck, "Guided self-scheduling", 1987): a thread that comes to run late, or is slower, does fewer of them, and all are
done at about the same time; each costs that lock once. Whoever asked takes the first piece, and those that no helper has
begun when it is done: it never waits for a thread that has not come to run.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from queue import SimpleQueue


# Fewer bytes are copied before another thread has come to run.
LEAST = 8 << 20
_LEAST_PIECE = 512 << 10
# Beyond this the memory is what limits it.
_MOST_THREADS = 4
_PAGE = 4096


class Copier:
    """Threads that help with copies. They begin with the first copy that is worth it.

    Args:
        threads: how many copy at once, with the one that asks; None: as many as there are CPUs, at most 4.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:
            threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._threads = threads
        self._queue: SimpleQueue[_Copy | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._helpers: list[threading.Thread] = []
        self._closed = False

    def move(self, target: int, origin: int, size: int) -> None:
        """Copy ``size`` bytes from one address to another; they must not overlap. Blocks until all are there."""
        if size < LEAST or self._threads < 2 or not self._begin():
            ctypes.memmove(target, origin, size)
            return
        copy = _Copy(target, origin, size, self._threads)
        for _ in range(self._threads - 1):
            self._queue.put(copy)
        copy.work()
        copy.finished.acquire()

    def close(self) -> None:
        """End the threads. A later copy is done by whoever asks for it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            helpers, self._helpers = self._helpers, []
        for _ in helpers:
            self._queue.put(None)
        for each in helpers:
            each.join()

    def _begin(self) -> bool:
        """Have the helpers, if there are to be any."""
        if self._helpers:
            return True
        with self._lock:
            if self._closed:
                return False
            if not self._helpers:
                self._helpers = [
                    threading.Thread(target=self._help, name="rally-copier", daemon=True)
                    for _ in range(self._threads - 1)
                ]
                for each in self._helpers:
                    each.start()
        return True

    def _help(self) -> None:
        while (copy := self._queue.get()) is not None:
            copy.work()


def pieces_of(size: int, threads: int) -> list[tuple[int, int]]:
    """Where each piece begins, and its bytes: half of each thread's share of what is left, whole pages, not too small."""
    pieces = []
    start = 0
    while start < size:
        step = max(_LEAST_PIECE, (size - start) // (2 * threads) // _PAGE * _PAGE)
        step = min(step, size - start)
        pieces.append((start, step))
        start += step
    return pieces


class _Copy:
    """One copy; ``finished`` is released when the last of its pieces is there."""

    __slots__ = ("_left", "_lock", "_origin", "_pieces", "_target", "finished")

    def __init__(self, target: int, origin: int, size: int, threads: int) -> None:
        self._target, self._origin = target, origin
        self._pieces = deque(pieces_of(size, threads))
        self._left = len(self._pieces)
        self._lock = threading.Lock()
        self.finished = threading.Lock()
        self.finished.acquire()

    def work(self) -> None:
        """Copy pieces until none is left that nobody has begun."""
        while True:
            try:
                start, size = self._pieces.popleft()
            except IndexError:
                return
            ctypes.memmove(self._target + start, self._origin + start, size)
            with self._lock:
                self._left -= 1
                is_last = not self._left
            if is_last:
                self.finished.release()
