"""Returning pooled memory to the system once it has not been used for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from rallypoint.wire.recycler import Recycler
from rallypoint.wire.shm import Budget


# Seconds that unused memory is kept.
KEPT: Final = 60.0
# Seconds between checks while the other end holds memory: it does not report releases.
LOOK: Final = 15.0


class UnusedMemory:
    """Trims the pools of one agent. Runs only while they hold memory.

    Args:
        later: calls a function after a delay in seconds.
    """

    def __init__(self, later: Callable[[float, Callable[[], None]], None]) -> None:
        self._later = later
        self._looks = False
        self._sources: tuple[Budget, Recycler] | None = None

    def watch(self, budget: Budget, recycler: Recycler) -> None:
        self._sources = budget, recycler

    def used(self) -> None:
        """Memory was taken from a pool."""
        if not self._looks:
            self._looks = True
            self._later(KEPT, self._look)

    def _look(self) -> None:
        assert self._sources is not None
        # First, so that memory taken from here on schedules another check.
        self._looks = False
        now = time.monotonic()
        budget, recycler = self._sources
        shared, leased = budget.trim(now - KEPT)
        received = recycler.trim(now - KEPT)
        pause = min(
            [each + KEPT - now for each in (shared, received) if each is not None],
            default=LOOK if leased or recycler.has_lent else None,
        )
        if pause is None or self._looks:
            return
        self._looks = True
        self._later(min(pause, LOOK) if leased else max(pause, 0.01), self._look)
