"""A rank's part of a sharded tensor in a checkpoint: what it writes, and what it reads of a tensor with other shards.

``torch.distributed.checkpoint`` asks objects with these two methods what they hold. For each part to be read, it finds the parts
that were written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rallypoint.elastic import torch_private


@dataclass(frozen=True, slots=True)
class Shard:
    """One part, in host memory.

    Args:
        tensor: the part.
        shape: of the whole tensor.
        offsets: where the part begins in it.
        is_first: no other rank of the tensor's mesh with the same part writes it.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    is_first: bool = True

    @classmethod
    def like(cls, owner: Any, tensor: torch.Tensor) -> Shard:
        """A shard with the place that this rank's part of a sharded tensor has.

        Args:
            owner: a ``DTensor``.
            tensor: one with the shape of this rank's part.
        """
        offsets, is_first = torch_private.place_of_part(owner)
        return cls(tensor, tuple(owner.shape), offsets, is_first)

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.is_first or not self.tensor.numel():
            return []
        (chunk,) = self.__create_chunk_list__()
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.tensor.dtype),
                    size=torch.Size(self.shape),
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if not self.tensor.numel():
            return []
        return [ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)]


def whole(owner: Any, part: torch.Tensor) -> torch.Tensor:
    """A tensor that is sharded like another one.

    Args:
        owner: a ``DTensor``.
        part: this rank's.
    """
    with torch.no_grad():
        made = torch.zeros_like(owner, dtype=part.dtype)
        torch_private.local_part(made).copy_(part)
    return made
