"""How many calls a worker has made and served, and how long they took."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any


# Upper ends of the classes in which latencies are counted, in seconds; the last class is open.
BOUNDS: tuple[float, ...] = tuple(1e-5 * 2**k for k in range(24))
# Gathering is done by functions of this module.
_OWN_MODULE = "rallypoint.rpc.gather"


def is_own(target: Any) -> bool:
    """Whether a call of this function is the package's own: a shutdown does not look for those."""
    return getattr(target, "__module__", None) == _OWN_MODULE


@dataclass(slots=True)
class Counters:
    """Counts since the worker joined, for people: incremented without a lock, they may miss one.

    Attributes:
        sent: calls made.
        served: calls answered.
        failed: those of them that raised.
        latencies: of served calls from arrival to answer, counted by class (``BOUNDS``).
    """

    sent: int = 0
    served: int = 0
    failed: int = 0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))

    def note(self, seconds: float) -> None:
        # log2 of how often 10 microseconds fit, without a loop.
        index = int(seconds * 1e5).bit_length()
        self.latencies[min(index, len(BOUNDS))] += 1

    def quantile(self, part: float) -> float | None:
        """Seconds that this part of the served calls took at most, to a factor of 2; None before the first."""
        total: int = sum(self.latencies)
        if not total:
            return None
        seen = 0
        for index, count in enumerate(self.latencies):
            seen += count
            if seen >= part * total:
                return BOUNDS[min(index, len(BOUNDS) - 1)]
        return BOUNDS[-1]


class Tally:
    """A count that is exact without a lock: a shutdown goes by how many calls were made and served.

    Any number of threads add to it. An addition is one call of C code, so that none is lost.

    Attributes:
        add: adds one.
    """

    __slots__ = ("_lock", "_looks", "add")

    def __init__(self) -> None:
        self.add = itertools.count().__next__
        self._lock = threading.Lock()
        # Each look takes a number as well.
        self._looks = 0

    def value(self) -> int:
        """How often something was added so far."""
        with self._lock:
            found = self.add() - self._looks
            self._looks += 1
            return found
