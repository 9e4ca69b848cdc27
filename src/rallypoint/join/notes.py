"""Notes of ranks that left the loop early, kept in the group's store."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rallypoint.errors import JoinError

from . import torch_private
from .leaving import names_of


class Notes:
    """The notes of one block, in the store of its group.

    Args:
        group: the ranks that write notes. None: the default group.
        device: where the group's collectives work.
        number: identifies the block; the same on all ranks, and never used twice.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, number: int) -> None:
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._group = torch_private.group_or_default(group)
        self._device = device
        self._store = torch_private.store_of(self._group)
        self._prefix = f"rallypoint/join/{number}"

    def write(self, step: int) -> None:
        """Note that this rank has left: ``step`` is the first one without it."""
        self._store.set(self._key(self._rank), str(step))
        self._store.set(f"{self._prefix}/any", "")

    def read(self) -> dict[int, int]:
        """The notes written so far: for each rank that left, the first step without it."""
        if not self._store.check([f"{self._prefix}/any"]):
            return {}
        ranks = [r for r in range(self._world_size) if self._store.check([self._key(r)])]
        return {rank: int(self._store.get(self._key(rank))) for rank in ranks}

    def wait(self) -> dict[int, int]:
        """The notes of all ranks.   Blocks: until all have been written, at most for the group's time limit.

        Raises:
            JoinError: some rank did not write its note in time.
        """
        patience = torch_private.timeout_of(self._group, self._device)
        try:
            self._store.wait([self._key(rank) for rank in range(self._world_size)], patience)
        except (dist.DistStoreError, RuntimeError) as error:
            there = self.read()
            others = [rank for rank in range(self._world_size) if rank not in there]
            raise JoinError(
                f"rank {self._rank} left its loop early, and {names_of(others) if others else 'another rank'} did"
                f" not leave within {patience.total_seconds():g} s; break out of the loop in the same step on all"
                " ranks, or on none"
            ) from error
        return self.read()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"
