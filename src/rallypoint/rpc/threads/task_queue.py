"""What an agent has done by its pool beside calls: at once, soon, or later."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from .poller import Poller
from .thread_pool import Job, ThreadPool


logger = logging.getLogger(__name__)


class Task:
    """A function as a job."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def run(self) -> None:
        try:
            self._act()
        except BaseException:
            logger.exception("a task of the agent failed")


class TaskQueue:
    """Those of one agent.

    Args:
        pool: does them.
        poller: wakes the pool's leader, who takes what is to be done soon (:meth:`take`).
    """

    def __init__(self, pool: ThreadPool, poller: Poller) -> None:
        self._pool = pool
        self._poller = poller
        self._soon: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        # Under the lock:
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self, act: Callable[[], None]) -> None:
        """Have something done by a worker."""
        self._pool.submit(Task(act))

    def soon(self, act: Callable[[], None]) -> None:
        """The same. Safe in finalizers: takes no lock."""
        self._soon.append(act)
        self._poller.wake()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """The same, after some time."""
        when = time.monotonic() + seconds
        with self._lock:
            heapq.heappush(self.timers, (when, next(self._numbers), act))
        self._pool.wake_at(when)

    def take(self, jobs: deque[Job]) -> None:
        """By the leader, when it was woken."""
        while self._soon:
            jobs.append(Task(self._soon.popleft()))

    def due(self, now: float) -> float | None:
        """Have done what is due; returns when the next one is."""
        with self._lock:
            while self.timers and self.timers[0][0] <= now:
                self._pool.submit(Task(heapq.heappop(self.timers)[2]))
            return self.timers[0][0] if self.timers else None

    def close(self) -> None:
        """Drop what has not been done: nobody does it any more."""
        with self._lock:
            self.timers.clear()
        self._soon.clear()
