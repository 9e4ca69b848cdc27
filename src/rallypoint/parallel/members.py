"""Who is in a process group: how many, which of them is this process, what they are called."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rallypoint.errors import ConfigError


# Backends whose groups work on tensors of the CPU.
_ON_CPU = ("gloo", "mpi", "ucc")


def size_of(group: dist.ProcessGroup | None) -> int:
    """Number of ranks of ``group`` (None: the default group); 1 where there is no group at all."""
    if group is None and not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank in ``group``; 0 where there is no group at all.

    Raises:
        ConfigError: it is not in there.
    """
    if group is None and not dist.is_initialized():
        return 0
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError(
            "group", None, f"rank {dist.get_rank()} is not in it", "only its members may call this"
        )
    return rank


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """The members by their ranks in the job, in the order of the group."""
    if group is None and not dist.is_initialized():
        return [0]
    return dist.get_process_group_ranks(group)


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's collectives work; of a backend per device (``cpu:gloo,cuda:nccl``) the first one."""
    backend = dist.get_backend(group).lower()
    device, colon, _ = backend.partition(",")[0].partition(":")
    if colon:
        return torch.device(device)
    if any(name in backend for name in _ON_CPU):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
