"""Which rank keeps something for which: decisions only.

What the workers of a node keep in its memory is lost with the node. So each rank has a partner on the next node.
"""

from __future__ import annotations

from collections.abc import Sequence


def partners(nodes: Sequence[int]) -> tuple[int | None, ...]:
    """The partner of each rank: a rank of the next node that has workers; None for all if there is one node only.

    Args:
        nodes: the node of each rank.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    if len(ranks_of) < 2:
        return (None,) * len(nodes)
    order = sorted(ranks_of)
    following = dict(zip(order, order[1:] + order[:1], strict=True))
    found = []
    for rank, node in enumerate(nodes):
        there = ranks_of[following[node]]
        found.append(there[ranks_of[node].index(rank) % len(there)])
    return tuple(found)


def guests(nodes: Sequence[int], rank: int) -> tuple[int, ...]:
    """The ranks whose partner a rank is."""
    return tuple(guest for guest, partner in enumerate(partners(nodes)) if partner == rank)
