"""Which rank keeps copies for which: decisions only.

What the workers of a node keep in its memory is lost with the node. So each rank has a partner on the next node.
"""

from __future__ import annotations

from collections.abc import Sequence


def partners(nodes: Sequence[int], distance: int = 1) -> tuple[int | None, ...]:
    """The partner of each rank: a rank of the next node that has workers; None for all if there is only one node.

    Args:
        nodes: the node of each rank.
        distance: 1: the next node, 2: the one after it, and so on. If that is a rank's own node, the result is None for all.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    order = sorted(ranks_of)
    if distance % len(order) == 0:
        return (None,) * len(nodes)
    shift = distance % len(order)
    following = dict(zip(order, order[shift:] + order[:shift], strict=True))
    found = []
    for rank, node in enumerate(nodes):
        there = ranks_of[following[node]]
        found.append(there[ranks_of[node].index(rank) % len(there)])
    return tuple(found)


def hosts(nodes: Sequence[int], rank: int, copies: int) -> tuple[int, ...]:
    """The partners that keep a rank's copies, one on each of the next nodes.

    Args:
        nodes: the node of each rank.
        rank: the rank whose copies they keep.
        copies: how many nodes keep its state, including its own.
    """
    found = (partners(nodes, distance)[rank] for distance in range(1, min(copies, len(set(nodes)))))
    return tuple(each for each in found if each is not None)


def guests(nodes: Sequence[int], rank: int, copies: int) -> tuple[int, ...]:
    """The ranks that a rank is a partner of.

    Args:
        nodes: the node of each rank.
        rank: the partner.
        copies: as for :func:`hosts`.
    """
    return tuple(guest for guest in range(len(nodes)) if rank in hosts(nodes, guest, copies))
