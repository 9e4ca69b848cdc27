"""all_gather, reduce_scatter, all_reduce and broadcast, with gradients.

Unlike torch's, they return a new tensor and do not modify their argument. Gradients: see the note in ``exchange.py``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rallypoint.errors import ConfigError

from . import bare, checks as checking, members
from .bare import Group


def all_gather(x: Tensor, group: Group = None, *, dim: int = 0, checks: bool = False) -> Tensor:
    """Concatenate the ranks' tensors along ``dim``; differentiable.

    Collective: all ranks of ``group`` call it, in the same order.   Blocks: until peers have sent (NCCL: only the stream blocks).
    Args:
        x: at least one dimension, any dtype, on the group's device; equal in shape and dtype on all ranks.
        group: default: the default group. In a group of one, or without a default group, ``x`` itself is returned.
        dim: the dimension to concatenate along.
        checks: first compare the calls of all ranks. Costs one small all-gather.
    Returns:
        Like ``x``, with ``dim`` multiplied by the number of ranks; parts in group-rank order.
    Raises:
        ConfigError: ``x`` has no dimension ``dim``; with ``checks``, also: the ranks' calls differ; then raised on all ranks.
        RuntimeError: from the backend: a peer died, or did not call within the group's timeout.
    Gradient: reduce-scatter (sum) of the output's gradients: the gradient of the sum of all ranks' losses.
        If all ranks compute the same loss from the result, this counts it once per rank; see :func:`gather_from`.
    """
    _check("all_gather", x, group, dim=dim, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    return _gathered(x, dim % x.ndim, group)


def reduce_scatter(
    x: Tensor,
    group: Group = None,
    *,
    dim: int = 0,
    op: Literal["sum", "mean"] = "sum",
    checks: bool = False,
) -> Tensor:
    """Sum the ranks' tensors, and give each rank its part along ``dim``; differentiable.

    Collective: all ranks of ``group`` call it, in the same order.   Blocks: until peers have sent (NCCL: only the stream blocks).
    Args:
        x: on the group's device; equal in shape and dtype on all ranks. ``dim`` must be a multiple of the number of ranks.
        group: default: the default group. In a group of one, or without a default group, ``x`` itself is returned.
        dim: the dimension to divide.
        op: ``mean`` is the sum divided by the number of ranks; not for whole numbers.
        checks: first compare the calls of all ranks. Costs one small all-gather.
    Returns:
        Like ``x``, with ``dim`` divided by the number of ranks.
    Raises:
        ConfigError: ``dim`` is not divisible, or ``op`` is invalid; with ``checks``, also on all ranks if their calls differ.
        RuntimeError: from the backend: a peer died, or did not call within the group's timeout.
    Gradient: all-gather of the output's gradients (divided by the number of ranks for ``mean``): the
        gradient of the sum of all ranks' losses.
    """
    _check("reduce_scatter", x, group, dim=dim, divided=True, op=op, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    found = _scattered(x, dim % x.ndim, group)
    return found / members.size_of(group) if op == "mean" else found


def all_reduce(
    x: Tensor,
    group: Group = None,
    *,
    op: Literal["sum", "mean"] = "sum",
    checks: bool = False,
) -> Tensor:
    """Sum (or average) the ranks' tensors, with the result on every rank; differentiable.

    Collective: all ranks of ``group`` call it, in the same order.   Blocks: until peers have sent (NCCL: only the stream blocks).
    Args:
        x: on the group's device; equal in shape and dtype on all ranks.
        group: default: the default group. In a group of one, or without a default group, ``x`` itself is returned.
        op: ``mean`` is the sum divided by the number of ranks; not for whole numbers.
        checks: first compare the calls of all ranks. Costs one small all-gather.
    Returns:
        A tensor like ``x``.
    Raises:
        ConfigError: ``op`` is invalid; with ``checks``, also: the ranks' calls differ; then raised on all ranks.
        RuntimeError: from the backend: a peer died, or did not call within the group's timeout.
    Gradient: all-reduce (sum) of the output's gradients (divided by the number of ranks for ``mean``): the gradient
        of the sum of all ranks' losses. If all ranks compute the same loss from the result, this counts it
        once per rank; see :func:`reduce_from`.
    """
    _check("all_reduce", x, group, dim=None, op=op, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    found = _total(x, group)
    return found / members.size_of(group) if op == "mean" else found


def broadcast(x: Tensor, src: int = 0, group: Group = None, *, checks: bool = False) -> Tensor:
    """Send the tensor of one rank to all ranks of the group; differentiable.

    Collective: all ranks of ``group`` call it, in the same order.   Blocks: until ``x`` arrives (NCCL: only the stream blocks).
    Args:
        x: on the group's device; equal in shape and dtype on all ranks. Its values matter on ``src`` only.
        src: the sender's rank *in the group*, unlike in ``torch.distributed.broadcast``.
        group: default: the default group. In a group of one, or without a default group, ``x`` itself is returned.
        checks: first compare the calls of all ranks. Costs one small all-gather.
    Returns:
        A tensor like ``x``.
    Raises:
        ConfigError: the group has no rank ``src``; with ``checks``, also: the ranks' calls differ; then raised on all ranks.
        RuntimeError: from the backend: a peer died, or did not call within the group's timeout.
    Gradient: on ``src`` the sum of all ranks' output gradients, elsewhere zeros: the gradient of the sum of all ranks'
        losses. The backward pass is a collective, so ``x`` must require a gradient on all ranks or on none.
    """
    _check("broadcast", x, group, dim=None, src=src, everywhere=checks)
    if members.size_of(group) == 1:
        return x
    return _sent(x, src, group)


_WITHOUT_DIM = ("all_reduce", "broadcast")


def _check(
    operation: str,
    x: Tensor,
    group: Group,
    *,
    dim: int | None,
    divided: bool = False,
    op: str = "",
    src: int = 0,
    everywhere: bool,
) -> None:
    checking.check_types(x, group, 0 if operation in _WITHOUT_DIM else dim, src)
    if op not in ("", "sum", "mean"):
        raise ConfigError("op", op, "expected sum or mean")
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ConfigError(
            "op", op, f"expected a floating-point or complex x, not {x.dtype}", "use op='sum'"
        )
    checking.check_call(
        operation, x, group, dim=dim, divided=divided, settings=op, src=src, everywhere=everywhere
    )


def _gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    if not bare.needs_grad(x):
        return bare.gather(x, dim, group)
    found: Tensor = _AllGather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return found


def _scattered(x: Tensor, dim: int, group: Group) -> Tensor:
    if not bare.needs_grad(x):
        return bare.reduce_scatter(x, dim, group)
    found: Tensor = _ReduceScatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return found


def _total(x: Tensor, group: Group) -> Tensor:
    if not bare.needs_grad(x):
        return bare.total(x, group)
    found: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def _sent(x: Tensor, src: int, group: Group) -> Tensor:
    if not bare.needs_grad(x):
        return bare.broadcast(x, src, group)
    found: Tensor = _Broadcast.apply(x, src, group)  # type: ignore[no-untyped-call]
    return found


def _total_at(x: Tensor, dst: int, group: Group) -> Tensor:
    if not bare.needs_grad(x):
        return bare.total_at(x, dst, group)
    found: Tensor = _Reduce.apply(x, dst, group)  # type: ignore[no-untyped-call]
    return found


# Each is another's gradient, or its own, so gradients of gradients work, too.
# ctx is Any: torch has no public type for it.


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.how = (dim, group)
        return bare.gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grads[0], *ctx.how), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.how = (dim, group)
        return bare.reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grads[0], *ctx.how), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return bare.total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _total(grads[0], ctx.group), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, group: Group) -> Tensor:
        ctx.how = (src, group)
        return bare.broadcast(x, src, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _total_at(grads[0], *ctx.how), None, None


class _Reduce(torch.autograd.Function):
    """Used only as broadcast's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dst: int, group: Group) -> Tensor:
        ctx.how = (dst, group)
        return bare.total_at(x, dst, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sent(grads[0], *ctx.how), None, None
