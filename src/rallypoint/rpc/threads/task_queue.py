"""Background tasks of an agent: at once, soon, or later."""

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
    """The background tasks of one agent.

    Args:
        pool: runs them.
        poller: wakes the pool's leader, which calls :meth:`take`.
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
        """Run a task on another thread."""
        self._pool.submit(Task(act))

    def soon(self, act: Callable[[], None]) -> None:
        """As :meth:`now`, but safe in finalizers: takes no lock."""
        self._soon.append(act)
        self._poller.wake()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Run a task after this many seconds."""
        when = time.monotonic() + seconds
        with self._lock:
            heapq.heappush(self.timers, (when, next(self._numbers), act))
        self._pool.wake_at(when)

    def take(self, jobs: deque[Job]) -> None:
        """Called by the leader when it is woken."""
        while self._soon:
            jobs.append(Task(self._soon.popleft()))

    def due(self, now: float) -> float | None:
        """Run the tasks that are due. Returns when the next one is."""
        with self._lock:
            while self.timers and self.timers[0][0] <= now:
                self._pool.submit(Task(heapq.heappop(self.timers)[2]))
            return self.timers[0][0] if self.timers else None

    def close(self) -> None:
        """Drop the remaining tasks."""
        with self._lock:
            self.timers.clear()
        self._soon.clear()
