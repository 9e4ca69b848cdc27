"""Decides which nodes have fallen silent, from counters that should have moved. Pure.

Every node adds to a counter of its own; the observer notes, on its own clock, when it last saw each counter
move. No two clocks are compared (leases as in Gray and Cheriton, SOSP 1989, held by the observer).

The observer itself may be stopped: suspended with its whole job, or blocked because the store does not answer. Time during
which it did not look says nothing about the others (as in Lifeguard, arXiv:1707.00788).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar


Node = TypeVar("Node", bound=Hashable)


@dataclass(slots=True)
class Leases(Generic[Node]):
    """The observer's notes.

    Args:
        timeout: seconds without a move after which a node is lost.
    """

    timeout: float
    _seen: dict[Node, tuple[int, float]] = field(default_factory=dict)
    _looked: float | None = None

    def observe(self, now: float, counters: Mapping[Node, int]) -> tuple[Node, ...]:
        """Note the counters of all watched nodes, and return the nodes that are lost.

        Only a larger counter counts as a beat: a stranger may write back an old one.

        A node seen for the first time starts a fresh lease; a node that is left out is forgotten.
        """
        self._forgive(now)
        lost = []
        for node, counter in counters.items():
            before, since = self._seen.get(node, (None, now))
            if before is None or counter > before:
                since = now
            self._seen[node] = (counter if before is None else max(before, counter), since)
            if now - since > self.timeout:
                lost.append(node)
        for node in self._seen.keys() - counters.keys():
            del self._seen[node]
        return tuple(lost)

    def _forgive(self, now: float) -> None:
        """Count no more than half a lease of a pause between two looks."""
        pause = 0.0 if self._looked is None else now - self._looked - self.timeout / 2
        self._looked = now
        if pause > 0:
            self._seen = {
                node: (counter, since + pause) for node, (counter, since) in self._seen.items()
            }
