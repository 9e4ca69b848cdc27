"""Parameters of DistributedDataParallel modules within contexts.

DDP averages a gradient when autograd accumulates it in ``.grad``. So for these parameters, autograd accumulates in a temporary
``.grad``: the averaged gradient then goes to the context, and the parameter gets its own ``.grad`` back.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel

from rallypoint._core import ddp_groups

from .reach import Reached
from .transfer import CAPTURED


# By id: tensors compare element by element.
_averaged: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
# Held while parameters have a .grad of ours.
_lock = threading.Lock()


def average(module: torch.nn.Module) -> None:
    """Have a ``DistributedDataParallel`` module average its gradients in backward passes of contexts, too.

    Call it once on each rank, right after creating the module. Each rank has a context of its own; the passes of all ranks
    must be the same, as DDP's own backward passes must be. ``rallypoint.compat`` calls it for every such module.

    Args:
        module: the module whose parameters DDP averages.
    """
    for each in module.parameters():
        if each.requires_grad:
            _averaged[id(each)] = each
    if isinstance(module, DistributedDataParallel):
        ddp_groups.hold(module)


def is_averaged(leaf: Tensor | None) -> bool:
    return leaf is not None and _averaged.get(id(leaf)) is leaf


def computed_together(inputs: dict[Hashable, Reached]) -> dict[Hashable, Reached]:
    """Make all DDP parameters among the inputs need the same outputs: DDP averages when the last of them is computed."""
    averaged = [key for key, each in inputs.items() if is_averaged(each.leaf)] if _averaged else []
    if len(averaged) < 2:
        return inputs
    needs = list(dict.fromkeys(need for key in averaged for need in inputs[key].needs))
    return {**inputs, **{key: inputs[key]._replace(needs=needs) for key in averaged}}


def accumulate(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Reached],
    *,
    retain_graph: bool,
) -> list[Tensor | None]:
    """Like ``torch.autograd.grad``, but runs the hooks on the accumulation of gradients."""
    leaves = [each.leaf for each in inputs if each.leaf is not None]
    received = [each.target.node.source for each in inputs if each.leaf is None]  # type: ignore[attr-defined]
    # torch accepts a mixture.
    targets: Any = [each.target if each.leaf is None else each.leaf for each in inputs]
    with _lock:
        before = [each.grad for each in leaves]
        try:
            for leaf in leaves:
                leaf.grad = None
            CAPTURED.update(dict.fromkeys(received))
            torch.autograd.backward(
                list(outputs),
                list(gradients),
                retain_graph=retain_graph,
                inputs=targets,
            )
            return [
                _whole(each.leaf.grad)
                if each.leaf is not None
                else CAPTURED[each.target.node.source]  # type: ignore[attr-defined]
                for each in inputs
            ]
        finally:
            for source in received:
                CAPTURED.pop(source, None)
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient


def _whole(gradient: Tensor | None) -> Tensor | None:
    """A gradient that is not part of a larger memory: DDP reuses its buckets."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    if gradient.untyped_storage().nbytes() == gradient.nbytes:
        return gradient
    return gradient.clone()
