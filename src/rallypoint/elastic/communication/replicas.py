"""How groups and meshes are laid out over a job's replicas, and how they change with the number of replicas: decisions only.

A replica is a block of ranks that together hold the whole state: one rank with data parallelism alone, the ranks of a
tensor-parallel model, or the ranks among which FSDP shards the state (HSDP). Replicas leave and join whole, with their nodes.
A group has either members of one replica only, or ranks of all replicas: then more replicas give it more members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """How a sequence of ranks is laid out over the replicas.

    Args:
        places: of its members within a replica.
        is_over_all: it has the ranks at these places of all replicas, one replica after another; False: those of one replica.
    """

    places: tuple[int, ...]
    is_over_all: bool

    def members(self, size: int, rank: int, ranks: int) -> tuple[int, ...]:
        """Its members.

        Args:
            size: how many ranks a replica has.
            rank: this process's, which is in the same replica as the members if they are all in one.
            ranks: how many ranks there are.
        """
        first = rank - rank % size
        firsts = range(0, ranks, size) if self.is_over_all else (first,)
        return tuple(first + place for first in firsts for place in self.places)


def span_of(members: Sequence[int], size: int, ranks: int) -> Span | None:
    """How ranks are laid out over at least two replicas; None if in neither of the two ways.

    Args:
        members: global ranks.
        size: how many ranks a replica has.
        ranks: how many ranks there are.
    """
    first = members[0] - members[0] % size
    within = tuple(rank - first for rank in members)
    if all(0 <= place < size for place in within):
        return Span(within, is_over_all=False)
    span = Span(tuple(members[: len(members) * size // ranks]), is_over_all=True)
    return span if span.members(size, 0, ranks) == tuple(members) else None


def replica_size(
    groups: Sequence[Sequence[int]],
    split: Sequence[Sequence[int]],
    ranks: int,
    ranks_of_node: int,
) -> int | None:
    """How many ranks a replica has: the smallest possible number.

    Args:
        groups: members of all groups.
        split: members of the groups among which tensors are sharded.
        ranks: how many ranks there are.
        ranks_of_node: how many of them are on this node, which must hold whole replicas.
    Returns:
        The number; None if there are fewer than two replicas, or a replica spans several nodes.
    """
    if not split and all(len(each) == ranks for each in groups):
        return 1
    for size in range(1, ranks // 2 + 1):
        if ranks % size or ranks_of_node % size:
            continue
        spans = [span_of(each, size, ranks) for each in groups]
        parts = [span_of(each, size, ranks) for each in split]
        if None not in spans and not any(each is None or each.is_over_all for each in parts):
            return size
    return None
