"""Conjugate pairs: what stands before and behind a layer that is divided among ranks.

[Note: Replicated] Between such layers every rank of the group holds the same tensor and, in the end, computes the
same loss, which counts *once*. So these gradients are not those of ``all_reduce`` and ``all_gather`` ([Note:
Gradients]): a gradient that is the same on all ranks is not added up again, and one of which each rank
knows a part is. The two of a pair are each other's backward pass:

    copy_to      forward: nothing               backward: sum over ranks
    reduce_from  forward: sum over ranks        backward: nothing

    scatter_to   forward: own part              backward: gather
    gather_from  forward: gather                backward: own part

    gather_sequence          forward: gather            backward: reduce-scatter
    reduce_scatter_sequence  forward: reduce-scatter    backward: gather

A layer divided by columns begins with ``copy_to`` (each rank computes some of the outputs, ``gather_from`` joins
them); one divided by rows ends with ``reduce_from`` (each rank's sum is a part of the sum). With sequence
parallelism the tensor between layers is divided along the sequence, and the last pair takes the place of the first.

Source: Megatron-LM (arXiv 1909.08053, where the first pair is called f and g), and with sequence
parallelism arXiv 2205.05198 (there g and g with a bar).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import bare, checks as checking, collectives, members
from .bare import Group


def copy_to(x: Tensor, group: Group = None, *, checks: bool = False) -> Tensor:
    """``x`` as it is; its gradient is summed over ``group``. Before a layer divided by columns.

    Collective: only its backward pass is, which every rank of ``group`` runs; with ``checks`` the call too.
    Args:
        x: the same on all ranks, any shape.
        group: default: the default group; without any, and in a group of one, nothing is summed.
        checks: first ask all ranks whether their calls go together. Costs one small all-gather.
    Returns:
        ``x``; it shares its memory.
    Raises:
        ConfigError: with ``checks``: ranks differ.
    Gradient: all-reduce (sum) of the output's gradients: that of one loss by an ``x`` that all ranks share.
    """
    checking.check_types(x, group)
    checking.check_call("copy_to", x, group, dim=None, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    return _copied(x, group)


def reduce_from(x: Tensor, group: Group = None, *, checks: bool = False) -> Tensor:
    """The sum of ``x`` over ``group``; its gradient is passed on as it is. Behind a layer divided by rows.

    Collective: every rank of ``group`` calls it, in the same order; its backward pass is not.   Blocks: until peers have sent
    (NCCL: the stream does).
    Args:
        x: each rank's part of the sum; of one shape and dtype on all ranks.
        group, checks: as in :func:`copy_to`.
    Returns:
        As ``x``, the same on all ranks.
    Raises:
        ConfigError: with ``checks``: ranks differ.
        RuntimeError: from the backend: a peer died, or did not come within the group's time-out.
    Gradient: the output's own: that of one loss, which all ranks compute alike from the sum.
    """
    checking.check_types(x, group)
    checking.check_call("reduce_from", x, group, dim=None, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    return _reduced(x, group)


def scatter_to(x: Tensor, group: Group = None, *, dim: int = -1, checks: bool = False) -> Tensor:
    """This rank's part of ``x`` along ``dim``. Before a layer divided by rows.

    Collective: only its backward pass is, which every rank of ``group`` runs; with ``checks`` the call too.
    Args:
        x: the same on all ranks; ``dim`` is a multiple of their number.
        group, checks: as in :func:`copy_to`.
        dim: what is divided.
    Returns:
        As ``x``, with ``dim`` divided by the number of ranks; a copy.
    Raises:
        ConfigError: ``dim`` does not divide; with ``checks`` also that ranks differ, and then on all of them.
    Gradient: all-gather of the parts' gradients: that of one loss by an ``x`` that all ranks share.
    """
    checking.check_types(x, group, dim)
    checking.check_call("scatter_to", x, group, dim=dim, divided=True, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    return _scattered(x, dim % x.ndim, group)


def gather_from(x: Tensor, group: Group = None, *, dim: int = -1, checks: bool = False) -> Tensor:
    """The ranks' parts joined along ``dim``. Behind a layer divided by columns.

    Collective: every rank of ``group`` calls it, in the same order; its backward pass is not.   Blocks: until peers have sent
    (NCCL: the stream does).
    Args:
        x: of one shape and dtype on all ranks.
        group, checks: as in :func:`copy_to`.
        dim: where they are joined.
    Returns:
        As ``x``, with ``dim`` as many times as long as there are ranks; the same on all of them.
    Raises:
        ConfigError: ``x`` has no such dimension; with ``checks`` also that ranks differ, and then on all of them.
        RuntimeError: from the backend: a peer died, or did not come within the group's time-out.
    Gradient: this rank's part of the output's: that of one loss, which all ranks compute alike from the whole.
    """
    checking.check_types(x, group, dim)
    checking.check_call("gather_from", x, group, dim=dim, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    return _joined(x, dim % x.ndim, group)


def gather_sequence(
    x: Tensor, group: Group = None, *, dim: int = 1, checks: bool = False
) -> Tensor:
    """The whole sequence from the ranks' parts. Before a layer divided by columns.

    :func:`all_gather` by another name and with another default: what follows is divided, so each rank knows
    a part of the gradient, and the parts are summed.

    Collective: every rank of ``group`` calls it.   Blocks: as :func:`all_gather`.
    Args:
        x: this rank's part, ``[batch, sequence, ...]``; parts have one shape.
        group: default: the default group.
        dim: where the sequence is.
        checks: first ask all ranks whether their calls go together.
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
    """The sum of the ranks' tensors, divided along the sequence. Behind a layer divided by rows.

    :func:`reduce_scatter` by another name and with another default.

    Collective: every rank of ``group`` calls it.   Blocks: as :func:`reduce_scatter`.
    Args:
        x: ``[batch, sequence, ...]``, of one shape on all ranks; the sequence divides by their number.
        group: default: the default group.
        dim: where the sequence is.
        checks: first ask all ranks whether their calls go together.
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
