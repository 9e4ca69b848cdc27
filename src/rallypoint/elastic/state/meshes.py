"""The device meshes of this process, and what FSDP has read from them: they stay the same objects when the replicas change."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from rallypoint.elastic import torch_private
from rallypoint.elastic.communication.replicas import Span, span_of


class Meshes:
    """All meshes that exist when the session begins.

    Args:
        modules: the session's.
        size: how many ranks a replica has.
        ranks: how many ranks there are.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], size: int, ranks: int) -> None:
        self._modules = modules
        self._size = size
        self._count = ranks // size
        self.can_resize = True
        self._held: list[tuple[weakref.ref[Any], Span, Span, Any]] = []
        for mesh in torch_private.meshes():
            rank_map, members = torch_private.ranks_of_mesh(mesh)
            if members is None:
                continue  # this process has no place in it
            whole, own = (span_of(each, size, ranks) for each in (rank_map, members))
            layout = torch_private.layout_of_mesh(mesh)
            first = torch_private.first_size(layout)
            if whole is None or own is None or (own.is_over_all and first % self._count):
                # Its replicas are along a dimension other than the first, or along several.
                self.can_resize = False
            else:
                self._held.append((weakref.ref(mesh), whole, own, layout))

    def resize(self, rank: int, ranks: int) -> None:
        """There are this many ranks from now on, and this process is one of them. Its groups have been resized."""
        span_replicas = False
        for reference, whole, own, layout in self._held:
            if (mesh := reference()) is None:
                continue
            if own.is_over_all:
                span_replicas = True
                first = torch_private.first_size(layout) // self._count * (ranks // self._size)
                layout = torch_private.with_first_size(layout, first)
            torch_private.renew_mesh(mesh, whole.members(self._size, rank, ranks), layout, rank)
        if span_replicas:
            torch_private.renew_fsdp_meshes(self._modules)
            torch_private.forget_traces()
