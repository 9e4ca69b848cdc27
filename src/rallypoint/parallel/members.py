"""The members of a process group: their number, their global ranks, and this process's rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rallypoint.errors import ConfigError


# Backends that work on CPU tensors.
_ON_CPU = ("gloo", "mpi", "ucc")


def size_of(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in ``group`` (None: the default group); 1 without a default group.

    Raises:
        ConfigError: this process is not a member.
    """
    if group is None and not dist.is_initialized():
        return 1
    size = dist.get_world_size(group)
    if size < 0:
        raise _not_a_member()
    return size


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank in ``group``; 0 without a default group.

    Raises:
        ConfigError: this process is not a member.
    """
    if group is None and not dist.is_initialized():
        return 0
    rank = dist.get_rank(group)
    if rank < 0:
        raise _not_a_member()
    return rank


def _not_a_member() -> ConfigError:
    return ConfigError(
        "group",
        None,
        f"rank {dist.get_rank()} is not a member",
        "only members of the group may call this",
    )


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """The members' global ranks, in group-rank order."""
    if group is None and not dist.is_initialized():
        return [0]
    return dist.get_process_group_ranks(group)


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The device of the group's collectives; with several backends (``cpu:gloo,cuda:nccl``), the first one's."""
    backend = dist.get_backend(group).lower()
    device, colon, _ = backend.partition(",")[0].partition(":")
    if colon:
        return torch.device(device)
    if any(name in backend for name in _ON_CPU):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
