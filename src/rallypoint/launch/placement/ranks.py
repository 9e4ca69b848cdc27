"""Which worker gets which rank: pure arithmetic over the members of a round.

Nodes are in node-rank order; workers of one node are neighbours, so that ranks that talk most sit
on one machine (torchrun's order: torch/distributed/elastic/agent/server/api.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRanks:
    """One worker's place.

    ``group`` is the node, as torchrun calls it; ``role`` ranks count workers of one role, and one
    launch has one role.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int


def assign(
    workers_of_nodes: Sequence[int],
    node_rank: int,
    *,
    local_rank_base: int = 0,
    local_world_size: int | None = None,
    group_rank: int | None = None,
    group_world_size: int | None = None,
    rank_offset: int = 0,
    world_size: int | None = None,
) -> tuple[WorkerRanks, ...]:
    """The ranks of one node's workers.

    Args:
        workers_of_nodes: number of workers of each node, by node rank.
        node_rank: the node whose workers are wanted.
        local_rank_base: local rank of its first worker, where several supervisors share a machine.
        local_world_size: in that case, workers on the machine; default: this node's own.
        group_rank: in that case, the machine's rank; default: ``node_rank``.
        group_world_size: in that case, number of machines; default: number of nodes.
        rank_offset: added to every rank (function launches that are one part of a larger job).
        world_size: the world size of that larger job.

    Raises:
        ConfigError: a rank would be outside of the world.
    """
    base = rank_offset + sum(workers_of_nodes[:node_rank])
    world = world_size if world_size is not None else sum(workers_of_nodes)
    own = workers_of_nodes[node_rank]
    if base + own > world:
        raise ConfigError(
            "rank_offset", rank_offset, f"{own} workers from rank {base} exceed world size {world}"
        )
    return tuple(
        WorkerRanks(
            rank=base + index,
            world_size=world,
            local_rank=local_rank_base + index,
            local_world_size=own if local_world_size is None else local_world_size,
            group_rank=node_rank if group_rank is None else group_rank,
            group_world_size=len(workers_of_nodes)
            if group_world_size is None
            else group_world_size,
        )
        for index in range(own)
    )
