"""Conjugate pairs of operations, placed before and after a layer that is divided among ranks.

[Note: Replicated] Between such layers, every rank of the group holds the same tensor, and in the end computes the
same loss, which counts *once*. So the gradients differ from those of ``all_reduce`` and ``all_gather`` ([Note:
Gradients]): a gradient that is equal on all ranks is not summed again, and a gradient of which each rank has only a
part is summed. The two operations of a pair are each other's backward pass:

    copy_to      forward: identity              backward: sum over ranks
    reduce_from  forward: sum over ranks        backward: identity

    scatter_to   forward: own part              backward: gather
    gather_from  forward: gather                backward: own part

    gather_sequence          forward: gather            backward: reduce-scatter
    reduce_scatter_sequence  forward: reduce-scatter    backward: gather

A layer divided by columns starts with ``copy_to``: each rank computes some of the outputs, and ``gather_from`` joins
them. A layer divided by rows ends with ``reduce_from``: each rank computes a partial sum. With sequence parallelism,
the tensor between layers is divided along the sequence, and the last pair replaces the first.

Source: Megatron-LM (arXiv 1909.08053, where the first pair is called f and g) and, with sequence
parallelism, arXiv 2205.05198 (where the last pair is called g and g with a bar).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import bare, checks as checking, collectives, members
from .bare import Group


def copy_to(x: Tensor, group: Group = None, *, checks: bool = False) -> Tensor:
    """Return ``x``, and sum its gradient over ``group``. Use before a layer divided by columns.

    Collective: only the backward pass, which every rank of ``group`` runs; with ``checks``, the call, too.
    Args:
        x: equal on all ranks, any shape.
        group: default: the default group. In a group of one, or without a default group, nothing is summed.
        checks: first compare the calls of all ranks. Costs one small all-gather.
    Returns:
        A view of ``x``.
    Raises:
        ConfigError: ``x`` or ``group`` has a wrong type; with ``checks``, also: the ranks' calls differ.
    Gradient: all-reduce (sum) of the output's gradients, which is the gradient of one loss with respect to the shared ``x``.
    """
    checking.check_types(x, group)
    checking.check_call("copy_to", x, group, dim=None, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    return _copied(x, group)


def reduce_from(x: Tensor, group: Group = None, *, checks: bool = False) -> Tensor:
    """Sum ``x`` over ``group``, and pass its gradient on unchanged. Use after a layer divided by rows.

    Collective: every rank of ``group`` calls it, in the same order; the backward pass is not collective.   Blocks: until peers
    have sent (NCCL: only the stream blocks).
    Args:
        x: this rank's partial sum; equal in shape and dtype on all ranks.
        group, checks: as in :func:`copy_to`.
    Returns:
        A tensor like ``x``, equal on all ranks.
    Raises:
        ConfigError: ``x`` or ``group`` has a wrong type; with ``checks``, also: the ranks' calls differ.
        RuntimeError: from the backend: a peer died, or did not call within the group's timeout.
    Gradient: the output's gradient, which is that of one loss, since all ranks compute the same loss from the sum.
    """
    checking.check_types(x, group)
    checking.check_call("reduce_from", x, group, dim=None, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    return _reduced(x, group)


def scatter_to(x: Tensor, group: Group = None, *, dim: int = -1, checks: bool = False) -> Tensor:
    """Take this rank's part of ``x`` along ``dim``. Use before a layer divided by rows.

    Collective: only the backward pass, which every rank of ``group`` runs; with ``checks``, the call, too.
    Args:
        x: equal on all ranks. ``dim`` must be a multiple of the number of ranks.
        group, checks: as in :func:`copy_to`.
        dim: the dimension to divide.
    Returns:
        A copy of this rank's part: like ``x``, with ``dim`` divided by the number of ranks.
    Raises:
        ConfigError: ``dim`` is not divisible; with ``checks`` also: the ranks' calls differ; then raised on all ranks.
    Gradient: all-gather of the parts' gradients, which is the gradient of one loss with respect to the shared ``x``.
    """
    checking.check_types(x, group, dim)
    checking.check_call("scatter_to", x, group, dim=dim, divided=True, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    return _scattered(x, dim % x.ndim, group)


def gather_from(x: Tensor, group: Group = None, *, dim: int = -1, checks: bool = False) -> Tensor:
    """Concatenate the ranks' parts along ``dim``. Use after a layer divided by columns.

    Collective: every rank of ``group`` calls it, in the same order; the backward pass is not collective.   Blocks: until peers
    have sent (NCCL: only the stream blocks).
    Args:
        x: this rank's part; equal in shape and dtype on all ranks.
        group, checks: as in :func:`copy_to`.
        dim: the dimension to concatenate along.
    Returns:
        Like ``x``, with ``dim`` multiplied by the number of ranks; equal on all ranks.
    Raises:
        ConfigError: ``x`` has no dimension ``dim``; with ``checks`` also: the ranks' calls differ; then raised on all ranks.
        RuntimeError: from the backend: a peer died, or did not call within the group's timeout.
    Gradient: this rank's part of the output's gradient, which is that of one loss, since all ranks compute the same loss.
    """
    checking.check_types(x, group, dim)
    checking.check_call("gather_from", x, group, dim=dim, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    return _joined(x, dim % x.ndim, group)


def gather_sequence(
    x: Tensor, group: Group = None, *, dim: int = 1, checks: bool = False
) -> Tensor:
    """Concatenate the ranks' parts of a sequence. Use before a layer divided by columns.

    This is :func:`all_gather` with another default for ``dim``. The layer that follows is divided, so each rank has a
    part of the gradient, and the parts are summed.

    Collective: every rank of ``group`` calls it.   Blocks: as :func:`all_gather`.
    Args:
        x: this rank's part, ``[batch, sequence, ...]``; equal in shape on all ranks.
        group: default: the default group.
        dim: the sequence dimension.
        checks: first compare the calls of all ranks.
    Returns:
        ``[batch, sequence * ranks, ...]``, in the order of ranks.
    Raises:
        ConfigError, RuntimeError: as :func:`all_gather`.
    Gradient: reduce-scatter (sum) of the output's gradients.
    """
    return collectives.all_gather(x, group, dim=dim, checks=checks)


def reduce_scatter_sequence(
    x: Tensor, group: Group = None, *, dim: int = 1, checks: bool = False
) -> Tensor:
    """Sum the ranks' tensors, and give each rank its part of the sequence. Use after a layer divided by rows.

    This is :func:`reduce_scatter` with another default for ``dim``.

    Collective: every rank of ``group`` calls it.   Blocks: as :func:`reduce_scatter`.
    Args:
        x: ``[batch, sequence, ...]``, equal in shape on all ranks. The sequence must be a multiple of the number of ranks.
        group: default: the default group.
        dim: the sequence dimension.
        checks: first compare the calls of all ranks.
    Returns:
        This rank's part of the sum, ``[batch, sequence / ranks, ...]``.
    Raises:
        ConfigError, RuntimeError: as :func:`reduce_scatter`.
    Gradient: all-gather of the output's gradients.
    """
    return collectives.reduce_scatter(x, group, dim=dim, checks=checks)


def _copied(x: Tensor, group: Group) -> Tensor:
    found: Tensor = _CopyTo.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def _reduced(x: Tensor, group: Group) -> Tensor:
    if not bare.needs_grad(x):
        return bare.total(x, group)
    found: Tensor = _ReduceFrom.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def _scattered(x: Tensor, dim: int, group: Group) -> Tensor:
    if not bare.needs_grad(x):
        return bare.own_part(x, dim, group)
    found: Tensor = _ScatterTo.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return found


def _joined(x: Tensor, dim: int, group: Group) -> Tensor:
    if not bare.needs_grad(x):
        return bare.gather(x, dim, group)
    found: Tensor = _GatherFrom.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return found


# ctx is Any: torch has no public type for it.


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduced(grads[0], ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return bare.total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _copied(grads[0], ctx.group), None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.how = (dim, group)
        return bare.own_part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _joined(grads[0], *ctx.how), None, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.how = (dim, group)
        return bare.gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grads[0], *ctx.how), None, None
