"""A count that is exact without a lock: whether a shutdown may end depends on how many calls were made and served."""

from __future__ import annotations

import itertools
import threading


class Tally:
    """Any number of threads add to it. An addition is one call of C code, so that none is lost.

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
