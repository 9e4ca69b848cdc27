"""The references sent on one connection. If it ends, they may not have arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from .ids import Fork


# Settled references are removed once there are more than this.
_FEW = 64


class SentReferences:
    """References in the order of sending. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forks: list[Fork] = []
        self._enough = _FEW

    def add(self, forks: Iterable[Fork], unsettled: Callable[[list[Fork]], list[Fork]]) -> None:
        """Add references that are about to be sent.

        Args:
            unsettled: selects those that still keep something alive; the others are forgotten.
        """
        with self._lock:
            self._forks += forks
            if len(self._forks) > self._enough:
                self._forks = unsettled(self._forks)
                self._enough = max(_FEW, 2 * len(self._forks))

    def all(self) -> list[Fork]:
        with self._lock:
            return list(self._forks)

    def __len__(self) -> int:
        return len(self._forks)
