"""Copies of many bytes by several threads: one alone does not use what the memory can do.

The interpreter's lock is not held meanwhile. A copy is cut into small pieces, which threads take one by one: a thread that
comes to run late, or is slower, does fewer of them, and all are done at about the same time. Whoever asked takes pieces,
too, until none is left that nobody has begun: it never waits for a thread that has not come to run.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from queue import SimpleQueue


# Fewer bytes are copied before another thread has come to run.
LEAST = 8 << 20
# Less than a core's second cache: up to there the C library uses the processor's own instruction for copies on AMD, which does
# not read the target first. Each piece costs the interpreter's lock once.
PIECE = 768 << 10
_memmove = ctypes.memmove
# Beyond this the memory is what limits it.
_MOST_THREADS = 4


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
            _memmove(target, origin, size)
            return
        copy = _Copy(target, origin, size)
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


class _Copy:
    """One copy; ``finished`` is released when the last of its pieces is there."""

    __slots__ = ("_left", "_lock", "_origin", "_size", "_starts", "_target", "finished")

    def __init__(self, target: int, origin: int, size: int) -> None:
        self._target, self._origin, self._size = target, origin, size
        self._starts = deque(range(0, size, PIECE))
        self._left = len(self._starts)
        self._lock = threading.Lock()
        self.finished = threading.Lock()
        self.finished.acquire()

    def work(self) -> None:
        """Copy pieces until none is left that nobody has begun."""
        take, target, origin, size = self._starts.popleft, self._target, self._origin, self._size
        done = 0
        try:
            while True:
                start = take()
                _memmove(target + start, origin + start, min(PIECE, size - start))
                done += 1
        except IndexError:
            # Nothing is left to begin.
            pass
        if done:
            with self._lock:
                self._left -= done
                is_last = not self._left
            if is_last:
                self.finished.release()
