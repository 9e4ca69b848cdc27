"""The order of nodes that have no ranks yet: pure."""

from __future__ import annotations

import re
from collections.abc import Sequence


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts ``node2`` before ``node10``."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def assign_node_ranks(hosts: Sequence[str], leader: int) -> tuple[int, ...]:
    """Arrivals in rank order: the leader, which serves the stores, first; then by host name.

    Args:
        hosts: host name of each arrival.
        leader: index of the one that serves.

    Returns:
        Indices into ``hosts``; position is rank.
    """
    others = sorted(
        (index for index in range(len(hosts)) if index != leader),
        key=lambda index: (natural_key(hosts[index]), index),
    )
    return (leader, *others)
