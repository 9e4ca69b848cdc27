"""For how long workers have done nothing (no CPU time, no bytes from or to storage), and begun no collective. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    """What the workers of a node have used, from look to look."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def look(self, now: float, found: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
        """Note what the workers have used so far.

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
                # A child that has exited takes its numbers with it, which counts as movement too.
                if idle and moved == last.moved:
                    seen.since = last.since
            self._seen[rank] = seen
        return self.still(now)

    def still(self, now: float) -> dict[int, float]:
        """By rank: for how many seconds it has done nothing, if nothing has changed since the last look."""
        return {rank: now - each.since for rank, each in self._seen.items()}


class Standstill:
    """How many collectives the workers of a node have begun, from look to look."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}  # by pid: how many, and since when
        # When a worker was last seen to have begun more than before; None: not yet.
        self.moved_at: float | None = None

    def look(self, now: float, alive: Collection[int], begun: Mapping[int, int]) -> float:
        """Note what the workers have begun so far.

        Args:
            now: seconds on a monotonic clock.
            alive: the pids of all workers.
            begun: by pid. A worker that does not answer is left out: meanwhile, it begins nothing that the others could complete.
        Returns:
            For how many seconds none of them has begun anything; 0 if that is not known of any.
        """
        self._seen = {pid: each for pid, each in self._seen.items() if pid in alive}
        for pid, number in begun.items():
            if pid in alive and self._seen.get(pid, (-1, now))[0] != number:
                if pid in self._seen:
                    self.moved_at = now
                self._seen[pid] = number, now
        return now - max((since for _, since in self._seen.values()), default=now)
