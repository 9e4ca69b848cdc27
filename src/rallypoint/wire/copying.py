"""Copying large data with several threads: a single thread does not use the full memory bandwidth.

The GIL is released meanwhile. A copy is cut into small pieces, which the threads take one by one: a thread that
starts late, or is slower, copies fewer of them, and all finish at about the same time. The calling thread takes pieces
as well, until all have been started, so it never waits for a thread that has not been scheduled.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from queue import SimpleQueue


# Fewer bytes are copied before another thread is scheduled.
LEAST = 8 << 20
# Less than a core's L2 cache: up to that size, the C library uses the processor's copy instruction on AMD, which does
# not read the target first. Each piece acquires the GIL once.
PIECE = 768 << 10
_memmove = ctypes.memmove
# With more threads, memory bandwidth is the limit.
_MOST_THREADS = 4


class Copier:
    """Threads that help with copies. They start with the first copy that is large enough.

    Args:
        threads: how many copy at once, including the caller; None: the number of CPUs, at most 4.
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
        """Copy ``size`` bytes from one address to another; they must not overlap. Blocks until all are copied."""
        if size < LEAST or self._threads < 2 or not self._begin():
            _memmove(target, origin, size)
            return
        copy = _Copy(target, origin, size)
        for _ in range(self._threads - 1):
            self._queue.put(copy)
        copy.work()
        copy.finished.acquire()

    def close(self) -> None:
        """End the threads. Later copies are made by the calling thread alone."""
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
        """Start the helpers if necessary; False after :meth:`close`."""
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


class _Copy:
    """One copy; ``finished`` is released when its last piece is copied."""

    __slots__ = ("_left", "_lock", "_origin", "_size", "_starts", "_target", "finished")

    def __init__(self, target: int, origin: int, size: int) -> None:
        self._target, self._origin, self._size = target, origin, size
        self._starts = deque(range(0, size, PIECE))
        self._left = len(self._starts)
        self._lock = threading.Lock()
        self.finished = threading.Lock()
        self.finished.acquire()

    def work(self) -> None:
        """Copy pieces until all have been started."""
        take, target, origin, size = self._starts.popleft, self._target, self._origin, self._size
        done = 0
        try:
            while True:
                start = take()
                _memmove(target + start, origin + start, min(PIECE, size - start))
                done += 1
        except IndexError:
            # All pieces have been started.
            pass
        if done:
            with self._lock:
                self._left -= done
                is_last = not self._left
            if is_last:
                self.finished.release()
