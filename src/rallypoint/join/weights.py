"""Multiplies each rank's gradient by a factor before the mean over the ranks.

It does so in one of two places, depending on the kind of loop:

- *at the modules' outputs*, if every rank runs forward and backward in every step (replay). Whatever ranks exchange
  within backward (statistics of a SyncBatchNorm, shards, tokens) is then weighted already, and any kind of
  parameters works. A penalty computed from the parameters themselves is not scaled: each rank adds all of it to
  the mean.
- *at the parameters*, if ranks that have run out contribute zeros without running the model (hooks). There a penalty is
  scaled with the rest, and the other ranks' factors make up for the missing ones.

A factor of 1 costs nothing: hooks are registered only for other factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .torch_private import tree_map


class GradientScale:
    """Scales this rank's gradients in some modules.

    Args:
        modules: the modules whose gradients are averaged over the ranks.
        at_outputs: scale at the modules' outputs; False: at the parameters.
    """

    def __init__(self, modules: Sequence[nn.Module], *, at_outputs: bool) -> None:
        self._modules = modules
        self._at_outputs = at_outputs
        self._handles: list[RemovableHandle] = []
        self._factor = 1.0

    def set(self, factor: float) -> None:
        """Use this factor from now on. Outputs of earlier forward passes keep the factor they had."""
        self._factor = factor
        if (factor != 1.0) == bool(self._handles):
            return
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []
        elif self._at_outputs:
            for module in self._modules:
                self._handles += [
                    module.register_forward_pre_hook(self._take_off, with_kwargs=True),
                    module.register_forward_hook(self._put_on),
                ]
        else:
            every = {id(p): p for module in self._modules for p in module.parameters()}
            self._handles = [
                p.register_hook(self._scaled)  # type: ignore[no-untyped-call]
                for p in every.values()
                if p.requires_grad
            ]

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return _times(gradient, self._factor)

    def _put_on(self, _: nn.Module, __: Any, output: Any) -> Any:
        return tree_map(_scaling(self._factor), output)

    def _take_off(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        # Undo the factor where a gradient flows on into another of the modules, which applies it again.
        if not self._factor:
            return None
        return tree_map(_scaling(1.0 / self._factor), (args, kwargs))


def _scaling(factor: float) -> Callable[[Any], Any]:
    def scale(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return _Scaled.apply(leaf, factor)  # type: ignore[no-untyped-call]
        return leaf

    return scale


def _times(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    # Not a product: a gradient to be ignored may be infinite.
    return gradient * factor if factor else torch.zeros_like(gradient)


class _Scaled(torch.autograd.Function):
    """Identity in forward; multiplies the gradient by the factor in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _times(gradients[0], ctx.factor), None


def has_fsdp(module: nn.Module) -> bool:
    """Whether the module or any of its submodules is sharded by ``fully_shard``."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(part, FSDPModule) for part in module.modules())
