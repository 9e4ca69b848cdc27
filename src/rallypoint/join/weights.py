"""Each rank's gradient, multiplied by a factor before the ranks' mean is taken.

Two ways, for two kinds of module. Where parameters are what autograd accumulates into (a plain module, one in
DistributedDataParallel), a hook on each of them sees its whole gradient. A module of FSDP2 computes with parameters
of its own making; there the gradient is scaled where it enters the module, at its outputs. So what a
loss adds from the parameters directly (a penalty on their size, say) is scaled in the first way only.

A factor of 1 costs nothing: hooks stand only while there is another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle


class GradientScale:
    """The factor of this rank's gradients in the modules given.

    Args:
        modules: the ones whose gradients are averaged over the ranks.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._at_outputs = [module for module in modules if has_fsdp(module)]
        self._parameters = {
            id(parameter): parameter
            for module in modules
            if not has_fsdp(module)
            for parameter in module.parameters()
        }.values()
        self._handles: list[RemovableHandle] = []
        self._factor = 1.0

    def set(self, factor: float) -> None:
        """From now on; what has been computed forward keeps its old one where outputs are scaled."""
        self._factor = factor
        if (factor != 1.0) == bool(self._handles):
            return
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            return
        self._handles = [
            parameter.register_hook(self._scaled)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
            if parameter.requires_grad
        ]
        self._handles += [
            module.register_forward_hook(self._scale_outputs) for module in self._at_outputs
        ]

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        # Not a product: what does not count may be infinite.
        return gradient * self._factor if self._factor else torch.zeros_like(gradient)

    def _scale_outputs(self, _: nn.Module, __: Any, output: Any) -> Any:
        factor = self._factor

        def scale(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                return _Scaled.apply(leaf, factor)  # type: ignore[no-untyped-call]
            return leaf

        return pytree.tree_map(scale, output)


class _Scaled(torch.autograd.Function):
    """The same forward; backward multiplied by the factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        scaled = gradient * ctx.factor if ctx.factor else torch.zeros_like(gradient)
        return scaled, None


def has_fsdp(module: nn.Module) -> bool:
    """Whether it, or a part of it, is sharded by ``fully_shard``."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(part, FSDPModule) for part in module.modules())
