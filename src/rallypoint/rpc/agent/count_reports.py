"""Tells the supervisor of this process, every second, what an agent has counted."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rallypoint._core import call_counts, shared_page
from rallypoint.rpc.threads.task_queue import TaskQueue


# Seconds between two reports.
INTERVAL = 1.0


class CountReports:
    """The reports of one agent.

    Args:
        tasks: the agent's background tasks, which end with it.
        count: returns what is reported.
    """

    def __init__(self, tasks: TaskQueue, count: Callable[[], Mapping[str, Any]]) -> None:
        self._tasks = tasks
        self._count = count
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None

    def start(self) -> None:
        """Start reporting, if this process has a supervisor."""
        self._memory = shared_page.share(call_counts.NAME)
        self._report()

    def _report(self) -> None:
        """Report now, and again after the interval."""
        with self._lock:
            if self._memory is None or self._pid != os.getpid():
                return
            call_counts.write(self._memory, self._count())
        self._tasks.later(INTERVAL, self._report)

    def close(self) -> None:
        """Report for the last time."""
        with self._lock:
            memory, self._memory = self._memory, None
            if memory is not None and self._pid == os.getpid():
                call_counts.write(memory, self._count())
                memory.close()
