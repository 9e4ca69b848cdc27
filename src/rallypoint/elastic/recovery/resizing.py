"""Before a session: whether it can continue with another number of ranks in the same processes."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from rallypoint._core import resizable
from rallypoint.elastic.state.meshes import Meshes
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.worker.process import KeptProcess


def prepare(kept: KeptProcess, objects: Objects, on_misfit: Callable[[], None]) -> int | None:
    """Learn how groups, meshes and tensors are laid out over the ranks, so that they can be rebuilt for more or fewer replicas.

    Args:
        kept: this process.
        objects: the session's.
        on_misfit: called when a group is made later that rules this out.
    Returns:
        How many ranks together hold the whole state; None if the session cannot do without the present number of ranks.
    """
    if objects.has_zero or objects.ranks_differ:
        return None
    size = kept.groups.find_replicas(objects.split_among(), kept.ranks_of_node, on_misfit)
    if size is None or (size > 1 and not objects.are_replicated()):
        return None
    meshes = Meshes(objects.modules, size, dist.get_world_size())
    others = resizable.living()
    if not meshes.can_resize or not all(each.can_resize(size) for each in others):
        return None

    def resize(rank: int, ranks: int) -> None:
        meshes.resize(rank, ranks)
        for each in resizable.living():
            each.resize(rank, ranks)

    kept.on_resize = resize
    return size
