"""How much memory all pools of a process may take together."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rallypoint.errors import ConfigError

from .segment import Segment


if TYPE_CHECKING:
    from .pool import Pool


class Budget:
    """How much memory all pools of a process may take together. Thread-safe.

    Args:
        limit_bytes: capacity of all segments, leased and idle.

    Raises:
        ConfigError: that is negative.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise ConfigError("limit_bytes", limit_bytes, "expected a number of bytes, 0 for none")
        self.limit_bytes = limit_bytes
        # What follows is for the pools, which hold the lock. They compute under it; files are made and memory is
        # given back outside.
        self.lock = threading.Lock()
        self.used = 0
        self.pools: set[Pool] = set()
        self.freed = (
            0  # counts blocks that came back: the smaller its number, the longer one is idle
        )

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
