"""Which workers of a session hang: decisions only.

A worker that hangs outside of a collective has begun fewer collectives than the members of its groups that wait for it.
If all stand still and none is behind, a hang looks like long work, so none is to blame.

After a loss the ranks meet, and count again from there. A rank that does not come to the meeting still counts from an
earlier place.
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint._core.progress import COUNTED_FROM
from rallypoint.launch.coordination.step_tables import Tables


def behind(tables: Tables) -> tuple[int, ...]:
    """The ranks that others wait for.

    A rank that is ahead of another member in any group is itself waiting there. Ranks that are behind in some group and
    ahead in none are the ones that the others wait for, directly or not.

    Args:
        tables: the tables of all ranks.
    Returns:
        The ranks, in order. Empty if none is behind.
    """
    late: set[int] = set()
    waiting: set[int] = set()
    for begun in _comparable(tables):
        most, least = max(begun.values()), min(begun.values())
        if most > least:
            late.update(rank for rank, count in begun.items() if count < most)
            waiting.update(rank for rank, count in begun.items() if count > least)
    return tuple(sorted(late - waiting))


def _comparable(tables: Tables) -> Iterator[dict[int, int]]:
    """The counts that may be compared, by rank: the places that ranks count from; for each group, counts from the same place."""
    if not tables:
        return
    places = {rank: table.get(COUNTED_FROM, 0) for rank, table in tables.items()}
    yield places
    for group in {group for table in tables.values() for group in table} - {COUNTED_FROM}:
        for place in set(places.values()):
            begun = {
                rank: table[group]
                for rank, table in tables.items()
                if group in table and places[rank] == place
            }
            if begun:
                yield begun


class StepWatch:
    """Finds out when the workers of a node stand still.

    Args:
        timeout: seconds without a collective of any of them.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._since = 0.0
        self._tables: Tables | None = None

    def look(self, now: float, tables: Tables) -> bool:
        """Whether they have stood still for the timeout.

        Args:
            now: seconds on a monotonic clock.
            tables: the tables of this node's ranks.
        """
        if tables != self._tables:
            self._tables, self._since = tables, now
        return now - self._since >= self._timeout

    def forget(self) -> None:
        """Start over: a loss is being recovered from."""
        self._tables = None


class Standstill:
    """What all nodes say about their workers while these stand still.

    Args:
        nodes: how many there are.
        patience: seconds for which a node's word counts.
    """

    def __init__(self, nodes: int, patience: float) -> None:
        self._nodes = nodes
        self._patience = patience
        self._told: dict[int, tuple[float, int, Tables]] = {}

    def tell(
        self, now: float, node: int, meeting: int, tables: Tables
    ) -> tuple[tuple[int, ...], Tables] | None:
        """Take what a node says.
        Args:
            now: seconds on this node's monotonic clock.
            node: the node that says so.
            meeting: how many losses it knows of; counts restart with each.
            tables: the tables of its ranks.
        Returns:
            The ranks that hang and the tables of all ranks, once all nodes stand still.
        """
        self._told[node] = now, meeting, tables
        current = [
            each
            for at, told_in, each in self._told.values()
            if told_in == meeting and now - at < self._patience
        ]
        if len(current) < self._nodes:
            return None
        together = {rank: table for each in current for rank, table in each.items()}
        return behind(together), together
