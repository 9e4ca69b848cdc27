"""Collectives without gradients: each takes a tensor and returns a new one, on any backend.

[Note: Compiled] In a graph made by ``torch.compile``, a collective must be an operator without side effects that names
its group by a string, so that the compiler may move it. torch has such operators, but only under a private name. So each
function here has two branches: torch's public functions and, in a graph, those operators.

[Note: Types] Neither Gloo nor NCCL supports 16-bit integers, and Gloo does not support 8-bit floats. Unsupported dtypes are
moved as bytes and summed in a wider dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import members
from .torch_private import functional


Group = dist.ProcessGroup | None

P = ParamSpec("P")
T = TypeVar("T")

# torch 2.13 renamed these two, and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# [Note: Types]
_KNOWN = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)
_SUMMED_IN = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
}


def outside_of_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Like ``torch.compiler.disable``, but does not import the compiler (over a second) when used as a decorator."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            disabled: Callable[P, T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def needs_grad(x: Tensor) -> bool:
    """Whether a backward pass may need this call; if not, the call bypasses autograd."""
    return x.requires_grad and torch.is_grad_enabled()


def is_plain(x: Tensor) -> bool:
    """Whether a collective can take the tensor as it is, without checks or conversions."""
    return (
        not torch.compiler.is_compiling()
        and not needs_grad(x)
        and x.dtype in _KNOWN
        and x.dim() > 0
        and x.is_contiguous()
        and not x.is_conj()
        and not x.is_neg()
    )


def exchange_plainly(x: Tensor, group: Group) -> Tensor:
    """:func:`exchange` without splits, for a tensor that :func:`is_plain`."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def exchange(
    x: Tensor, recv_splits: Sequence[int] | None, send_splits: Sequence[int] | None, group: Group
) -> Tensor:
    """All-to-all of rows. Without splits, every peer gets the same number of rows."""
    if x.dtype not in _KNOWN:
        return _from_bytes(exchange(_as_bytes(x), recv_splits, send_splits, group), x.dtype)
    x = _dense(x)
    send = None if send_splits is None else list(send_splits)
    recv = None if recv_splits is None else list(recv_splits)
    if torch.compiler.is_compiling():
        if send is None or recv is None:
            size = members.size_of(group)
            send = recv = [x.shape[0] // size] * size
        return _compiled(functional.all_to_all_single(x, recv, send, _name(group)))
    out = torch.empty_like(x) if recv is None else x.new_empty((sum(recv), *x.shape[1:]))
    dist.all_to_all_single(out, x, recv, send, group=group)
    return out


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """The ranks' tensors, equal in shape, concatenated along ``dim``, which must be 0 or more."""
    if x.dtype not in _KNOWN:
        return _from_bytes(gather(_as_bytes(x), dim, group), x.dtype)
    size, x = members.size_of(group), _dense(x)
    if torch.compiler.is_compiling():
        op = functional.all_gather_into_tensor
        flat = _compiled(op(x, size, _name(group)))
    else:
        flat = x.new_empty((size * x.shape[0], *x.shape[1:]))
        _all_gather_single(flat, x, group=group)
    return flat if dim == 0 else torch.cat(flat.chunk(size), dim)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part, along ``dim``, of the sum over the ranks."""
    if x.dtype in _SUMMED_IN:
        return reduce_scatter(x.to(_SUMMED_IN[x.dtype]), dim, group).to(x.dtype)
    size = members.size_of(group)
    x = _dense(x if dim == 0 else torch.cat(x.chunk(size, dim)))
    if torch.compiler.is_compiling():
        op = functional.reduce_scatter_tensor
        return _compiled(op(x, "sum", size, _name(group)))
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    _reduce_scatter_single(out, x, group=group)
    return out


def total(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, on every rank."""
    if x.dtype in _SUMMED_IN:
        return total(x.to(_SUMMED_IN[x.dtype]), group).to(x.dtype)
    if torch.compiler.is_compiling():
        op = functional.all_reduce
        return _compiled(op(x.contiguous(), "sum", _name(group)))
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    """The tensor of rank ``src`` of the group, on every rank."""
    if x.dtype not in _KNOWN:
        return _from_bytes(broadcast(_as_bytes(x), src, group), x.dtype)
    if torch.compiler.is_compiling():
        op = functional.broadcast  # it takes the rank in the group
        return _compiled(op(x.contiguous(), src, _name(group)))
    out = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, _global(src, group), group=group)
    return out


def total_at(x: Tensor, dst: int, group: Group) -> Tensor:
    """The sum over the ranks on rank ``dst`` of the group; zeros on the other ranks."""
    if torch.compiler.is_compiling():  # there is no operator for a reduction to one rank
        out = total(x, group)
    else:
        out = x.clone(memory_format=torch.contiguous_format)
        dist.reduce(out, _global(dst, group), group=group)
    return out if members.rank_in(group) == dst else torch.zeros_like(out)


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part of ``x`` along ``dim``. No communication."""
    size = x.shape[dim] // members.size_of(group)
    part = x.narrow(dim, members.rank_in(group) * size, size)
    return part.clone(memory_format=torch.contiguous_format)


def gather_numbers(numbers: Sequence[int], group: Group) -> list[list[int]]:
    """Every rank's numbers, the same count from each, on every rank."""
    own = torch.tensor(numbers, dtype=torch.int64, device=members.device_of(group))
    found: list[list[int]] = gather(own[None], 0, group).tolist()
    return found


def _as_bytes(x: Tensor) -> Tensor:
    return _dense(x).unsqueeze(-1).view(torch.uint8)


def _dense(x: Tensor) -> Tensor:
    """The tensor with its values contiguous in memory, as a backend reads them."""
    if x.is_complex():
        x = x.resolve_conj()
    if not torch.compiler.is_compiling():
        x = x.resolve_neg()
    return x.contiguous()


def _from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.view(dtype).squeeze(-1)


def _compiled(pending: Tensor) -> Tensor:
    done: Tensor = functional.wait_tensor(pending)
    return done


def _name(group: Group) -> str:
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found.group_name


def _global(rank: int, group: Group) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
