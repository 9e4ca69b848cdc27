"""How many calls a worker has made and served, and how long they took."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any


# Upper bounds of the latency histogram's buckets, in seconds; the last bucket has none.
BOUNDS: tuple[float, ...] = tuple(1e-5 * 2**k for k in range(24))
# The package's own calls are to functions in this module.
_OWN_MODULE = "rallypoint.rpc.gather"


def is_own(target: Any) -> bool:
    """Whether a call of this function is the package's own: a shutdown ignores those."""
    return getattr(target, "__module__", None) == _OWN_MODULE


@dataclass(slots=True)
class Counters:
    """Counts since the worker joined, for users. Incremented without a lock, so they may miss a call.

    Attributes:
        sent: calls made.
        served: calls answered.
        failed: answered calls that raised.
        latencies: histogram of the time from arrival to answer (``BOUNDS``).
    """

    sent: int = 0
    served: int = 0
    failed: int = 0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))

    def note(self, seconds: float) -> None:
        # log2(seconds / 10 µs)
        index = int(seconds * 1e5).bit_length()
        self.latencies[min(index, len(BOUNDS))] += 1

    def quantile(self, part: float) -> float | None:
        """A quantile of the latency of served calls in seconds, to within a factor of 2; None before the first call."""
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
    """A count that is exact without a lock. A shutdown compares such counts of calls made and served.

    Any number of threads may add to it: an addition is a single call of C code.

    Attributes:
        add: adds one.
    """

    __slots__ = ("_lock", "_looks", "add")

    def __init__(self) -> None:
        self.add = itertools.count().__next__
        self._lock = threading.Lock()
        # Each call of value() advances the counter, too.
        self._looks = 0

    def value(self) -> int:
        """The number of additions so far."""
        with self._lock:
            found = self.add() - self._looks
            self._looks += 1
            return found
