"""Keeps track of the members of the last round that are gone, as far as this node knows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from .liveness import Loss, Neighbour


class Departures:
    """The members of the last round that are gone. Thread-safe.

    Attributes:
        ids: ids of all members by rank; empty on nodes that do not need them. A node that comes to lead the next round does,
            and learns then the ids of the ranks that it knows to be gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Under the lock:
        self.ids: tuple[str, ...] = ()
        self._find_watchable: Callable[[], Sequence[Neighbour]] = tuple
        self._gone: set[str] = set()  # by any sign
        self._ended: set[str] = set()  # for certain
        self._lost: set[str] = set()  # by this node's own pulse
        self._ranks: dict[int, bool] = {}  # gone, while ids are unknown; True if for certain

    def begin(self) -> None:
        """Start a new round, in which no member is gone."""
        with self._lock:
            self.ids, self._find_watchable = (), tuple
            for each in (self._gone, self._ended, self._lost, self._ranks):
                each.clear()

    def identify(self, ids: tuple[str, ...]) -> None:
        """Set the ids of all members, by rank."""
        with self._lock:
            self.ids = ids
            ranks = dict(self._ranks)
            self._ranks.clear()
        for rank, certain in ranks.items():
            self.note_rank(rank, certain=certain)

    def know(self, find_watchable: Callable[[], Sequence[Neighbour]]) -> None:
        """Set what finds the members whose exit this node can observe. In most rounds, on most nodes, it is not called."""
        with self._lock:
            self._find_watchable = find_watchable

    def note_rank(self, rank: int, *, certain: bool) -> None:
        with self._lock:
            if not self.ids:
                self._ranks[rank] = certain or self._ranks.get(rank, False)
            elif 0 <= rank < len(self.ids):
                self._gone.add(self.ids[rank])
                if certain:
                    self._ended.add(self.ids[rank])

    def note_loss(self, loss: Loss) -> None:
        """Note a member that this node's pulse has lost."""
        with self._lock:
            self._gone.add(loss.neighbour.node_id)
            self._lost.add(loss.neighbour.node_id)
            if loss.certain:
                self._ended.add(loss.neighbour.node_id)

    def note_gone(self, node_id: str) -> None:
        with self._lock:
            self._gone.add(node_id)

    def note_ended(self, node_ids: Iterable[str], *, gone: bool = True) -> None:
        with self._lock:
            self._ended.update(node_ids)
            if gone:
                self._gone.update(node_ids)

    def gone(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._gone)

    def ended(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._ended)

    def lost(self) -> list[str]:
        """Ids of the members that this node's pulse has lost."""
        with self._lock:
            return sorted(self._lost)

    def doubtful(self) -> list[Neighbour]:
        """Members whose exit can be observed and that are not known to have exited."""
        with self._lock:
            return [each for each in self._find_watchable() if each.node_id not in self._ended]

    def num_ended(self) -> int:
        """How many known members have exited for certain."""
        with self._lock:
            known = {*self.ids, *(each.node_id for each in self._find_watchable())}
            return len(self._ended & known)
