"""How much memory all pools of a process may take together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from rallypoint.errors import ConfigError

from .segment import Segment


class Spender(Protocol):
    """A pool, as the budget sees it. Only :meth:`trim` is called without the budget's lock held."""

    @property
    def has_leased(self) -> bool:
        """Whether any of its memory is in use."""

    def trim(self, before: float) -> int:
        """Release the blocks that have been idle since before this time (monotonic seconds); returns the bytes."""

    def collect(self) -> None:
        """Take note of the blocks that the receiver has returned."""

    def idle_segments(self) -> list[Segment]:
        """The blocks that nobody uses."""

    def forget(self, segment: Segment) -> None:
        """Drop an idle block; the caller releases its memory."""


class Budget:
    """How much memory all pools of a process may take together. Thread-safe.

    Args:
        limit_bytes: capacity of all segments, leased and idle.
        on_use: called whenever memory is leased; :meth:`give_back` is to be called some time after that.

    Raises:
        ConfigError: that is negative.
    """

    def __init__(self, limit_bytes: int, on_use: Callable[[], None] = lambda: None) -> None:
        if limit_bytes < 0:
            raise ConfigError("limit_bytes", limit_bytes, "expected a number of bytes, 0 for none")
        self.limit_bytes = limit_bytes
        self.on_use = on_use
        # What follows is for the pools, which hold the lock. They compute under it; files are made and memory is
        # given back outside.
        self.lock = threading.Lock()
        self.used = 0
        self.pools: set[Spender] = set()
        self.freed = (
            0  # counts blocks that came back: the smaller its number, the longer one is idle
        )

    def give_back(self, before: float) -> tuple[float | None, bool]:
        """Give the memory of all blocks to the system that have been idle since before this time.

        Args:
            before: monotonic seconds.

        Returns:
            since when those that are left have been idle, the longest of them; and whether any is leased.
        """
        with self.lock:
            pools = list(self.pools)
        for pool in pools:
            pool.trim(before)
        with self.lock:
            left = [each.idle_since for pool in pools for each in pool.idle_segments()]
            return min(left, default=None), any(pool.has_leased for pool in pools)

    def reserve(self, capacity: int) -> list[Segment] | None:
        """Count ``capacity`` in; returns whose memory has to be given back for it. None: that would not do."""
        missing = self.used + capacity - self.limit_bytes
        gone: list[Segment] = []
        if missing > 0:
            for pool in self.pools:
                pool.collect()
            idle = [(each, pool) for pool in self.pools for each in pool.idle_segments()]
            if sum(each.capacity for each, _ in idle) < missing:
                return None
            for each, pool in sorted(idle, key=lambda pair: pair[0].freed):
                if missing <= 0:
                    break
                pool.forget(each)
                gone.append(each)
                missing -= each.capacity
        self.used += capacity
        return gone
