"""Multiplies each rank's gradient by a factor before the mean over the ranks.

It does so in one of two places:

- *at the parameters*, if nothing is exchanged between a module's outputs and its parameters (DDP). How the loss uses
  the outputs does not matter, and what a rank with factor zero computed may even be infinite.
- *at the modules' outputs*, if ranks exchange something within backward (shards, statistics of a SyncBatchNorm,
  tokens) that must be weighted by then. Every rank then runs forward and backward in every step (replay). A penalty
  computed from the parameters themselves is not scaled: each rank adds all of it to the mean.

A factor of 1 costs nothing: hooks are registered only for other factors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rallypoint.errors import JoinError

from .torch_private import tree_leaves, tree_map


class GradientScale:
    """Scales this rank's gradients in some modules.

    Args:
        at_outputs: modules to scale at their outputs.
        at_parameters: modules to scale at their parameters.
    """

    def __init__(
        self, *, at_outputs: Sequence[nn.Module], at_parameters: Sequence[nn.Module]
    ) -> None:
        self._at_outputs = at_outputs
        self._at_parameters = at_parameters
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Node] = []  # their hooks would end with them
        self._factor = 1.0
        self._used_before: frozenset[nn.Module] = frozenset()

    def set(self, factor: float, used_before: Iterable[nn.Module] = ()) -> None:
        """Use this factor from now on. Outputs of earlier forward passes keep the factor they had.

        Args:
            factor: the factor for this rank's gradients.
            used_before: modules that have run backward since their last exchange (in ``no_sync()``).
        """
        self._factor = factor
        self._used_before = frozenset(used_before)
        if (factor != 1.0) == bool(self._handles):
            return
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles, self._nodes = [], []
            return
        for module in self._at_outputs:
            self._handles += [
                module.register_forward_pre_hook(self._take_off, with_kwargs=True),
                module.register_forward_hook(self._put_on),
            ]
        every = {
            id(p): (p, module)
            for module in self._at_parameters
            for p in module.parameters()
            if p.is_floating_point() or p.is_complex()
        }
        for p, module in every.values():
            # Not a hook of the parameter: it would also scale what autograd.grad() returns, which a loss may contain.
            node = accumulation_of(p)
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._scaled))
            if _notes_use(module):
                self._handles.append(node.register_prehook(partial(self._withheld, module)))

    def _scaled(self, gradients: Sequence[torch.Tensor | None]) -> Any:
        return tuple(None if each is None else _times(each, self._factor) for each in gradients)

    def _withheld(self, module: nn.Module, gradients: Sequence[torch.Tensor | None]) -> Any:
        # DDP exchanges which parameters were used, and takes those with a gradient as used. A replayed batch must not
        # count: the optimizer would decay and move parameters that no other rank used. A sparse gradient, which has no
        # rows, is not withheld, because DDP needs it. Nor are gradients if DDP has noted uses that it has not told yet:
        # it needs the gradients of those parameters.
        if self._factor or module in self._used_before:
            return None
        if any(each is not None and each.is_sparse for each in gradients):
            return None
        return (None,) * len(gradients)

    def _put_on(self, module: nn.Module, _: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        found: list[torch.Tensor] = []
        scaled = tree_map(partial(_scale, factor=self._factor, found=found), output)
        for leaf in tree_leaves(output):
            if _is_opaque(leaf) and (not found or any(t.requires_grad for t in _held_by(leaf))):
                raise JoinError(
                    f"{type(module).__name__}'s output holds {type(leaf).__name__}, in which Join cannot weight gradients;"
                    " return tensors, or tuples, lists, dicts or dataclasses of tensors"
                )
        return scaled

    def _take_off(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        # Undo the factor where a gradient flows on into another of the modules, which applies it again.
        if not self._factor:
            return None
        return tree_map(partial(_scale, factor=1.0 / self._factor, found=[]), (args, kwargs))


def accumulation_of(parameter: nn.Parameter) -> Node:
    """The node that adds to the parameter's ``.grad``. Its hooks last as long as the node: as someone, such as DDP, keeps it."""
    with _trainable(parameter):
        return get_gradient_edge(parameter).node


@contextmanager
def _trainable(parameter: nn.Parameter) -> Iterator[None]:
    """Let hooks be registered on a frozen parameter, which may be trained later in the same step and keeps its hooks."""
    before = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(before)


def _notes_use(module: nn.Module) -> bool:
    """Whether a module exchanges, in each step, which parameters the ranks used."""
    if not isinstance(module, DistributedDataParallel):
        return False
    return bool(module.find_unused_parameters and not module.static_graph)


def _scale(leaf: Any, *, factor: float, found: list[torch.Tensor]) -> Any:
    """The leaf with its gradient scaled. Adds each scaled tensor to ``found``."""
    if isinstance(leaf, torch.Tensor):
        if not leaf.requires_grad:
            return leaf
        scaled: torch.Tensor = _Scaled.apply(leaf, factor)  # type: ignore[no-untyped-call]
        found.append(scaled)
        return scaled
    again: Callable[[Any], Any] = partial(_scale, factor=factor, found=found)
    # tree_map does not look into these two.
    if isinstance(leaf, dict):
        other = copy.copy(leaf)
        other.update({key: tree_map(again, value) for key, value in leaf.items()})
        return other
    if _is_record(leaf):
        other = copy.copy(leaf)
        for each in fields(leaf):
            object.__setattr__(other, each.name, tree_map(again, getattr(leaf, each.name)))
        return other
    return leaf


def _is_record(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, type)


def _is_opaque(leaf: Any) -> bool:
    """Whether a leaf may hold tensors that :func:`_scale` does not find."""
    plain = (torch.Tensor, dict, str, bytes, int, float, complex, type)
    return leaf is not None and not isinstance(leaf, plain) and not _is_record(leaf)


def _held_by(leaf: Any) -> Iterator[torch.Tensor]:
    """The tensors among an object's own attributes."""
    held = getattr(leaf, "__dict__", {})
    return (each for each in tree_leaves(dict(held)) if isinstance(each, torch.Tensor))


def _times(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    # Multiplying by zero will not do: a gradient that is to be ignored may be infinite.
    return gradient * factor if factor else torch.zeros_like(gradient)


class _Scaled(torch.autograd.Function):
    """Identity in forward; multiplies the gradient by the factor in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()  # autograd refuses to modify a view in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _times(gradients[0], ctx.factor), None


def has_fsdp(module: nn.Module) -> bool:
    """Whether the module or any of its submodules is sharded by ``fully_shard``."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(part, FSDPModule) for part in module.modules())
