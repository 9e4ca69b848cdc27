"""The memory limit of all pools of a process."""

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
        """Find the blocks that the receiver has returned."""

    def idle_segments(self) -> list[Segment]:
        """The blocks that are not in use."""

    def forget(self, segment: Segment) -> None:
        """Drop an idle block; the caller releases its memory."""


class Budget:
    """The memory limit of all pools of a process. Thread-safe.

    Args:
        limit_bytes: capacity of all segments, leased and idle.
        on_use: called whenever memory is leased, to have :meth:`trim` called some time later.

    Raises:
        ConfigError: the limit is negative.
    """

    def __init__(self, limit_bytes: int, on_use: Callable[[], None] = lambda: None) -> None:
        if limit_bytes < 0:
            raise ConfigError("limit_bytes", limit_bytes, "expected a number of bytes, 0 for none")
        self.limit_bytes = limit_bytes
        self.on_use = on_use
        # For the pools, under the lock. Files are created and memory is released without the lock.
        self.lock = threading.Lock()
        self.used = 0
        self.pools: set[Spender] = set()
        self.freed = 0  # numbers returned blocks, to find the one that has been idle longest

    def trim(self, before: float) -> tuple[float | None, bool]:
        """Release the memory of all blocks that have been idle since before this time.

        Args:
            before: monotonic seconds.

        Returns:
            Since when the longest idle one of the remaining blocks has been idle, and whether any block is leased.
        """
        with self.lock:
            pools = list(self.pools)
        for pool in pools:
            pool.trim(before)
        with self.lock:
            left = [each.idle_since for pool in pools for each in pool.idle_segments()]
            return min(left, default=None), any(pool.has_leased for pool in pools)

    def reserve(self, capacity: int) -> list[Segment] | None:
        """Reserve ``capacity``. Returns the segments to release for it; None if that would not suffice."""
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
