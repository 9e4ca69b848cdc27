"""For how long workers have done nothing: no CPU time, no bytes from or to storage. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


# A process that uses less of one core than this does nothing: clients of loggers and monitors wake up now and then.
IDLE = 0.05


@dataclass(slots=True)
class _Seen:
    at: float
    pid: int
    cpu: float
    moved: int
    since: float


class Stillness:
    """What the workers of a node have used, look after look."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def look(self, now: float, found: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
        """Take note of what the workers have used so far.

        Args:
            now: seconds on a monotonic clock.
            found: by rank: ``pid``, ``cpu`` (seconds), ``read`` and ``written`` (bytes), with children.
        Returns:
            By rank: for how many seconds it has done nothing.
        """
        self._seen = {rank: each for rank, each in self._seen.items() if rank in found}
        for rank, each in found.items():
            moved = each["read"] + each["written"]
            last = self._seen.get(rank)
            seen = _Seen(now, each["pid"], each["cpu"], moved, now)
            if last is not None and last.pid == seen.pid:
                idle = abs(seen.cpu - last.cpu) <= IDLE * max(0.0, now - last.at)
                # A child that has ended takes its numbers with it: that is movement as well.
                if idle and moved == last.moved:
                    seen.since = last.since
            self._seen[rank] = seen
        return self.still(now)

    def still(self, now: float) -> dict[int, float]:
        """By rank: for how many seconds it had done nothing at the last look, and since."""
        return {rank: now - each.since for rank, each in self._seen.items()}
