"""Checks of a collective's arguments: on this rank, or compared across all ranks before the call can hang."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from rallypoint._core.whole_numbers import is_whole
from rallypoint.errors import ConfigError

from . import bare, members
from .signatures import Signature, find_problem, own_problem


def check_types(x: object, group: object, dim: object = 0, src: object = 0) -> None:
    """Check the types of a collective's arguments. In a compiled graph, check nothing.

    Raises:
        ConfigError: an argument has a wrong type, or ``x`` has a tangent.
    """
    if torch.compiler.is_compiling():
        return
    if not isinstance(x, Tensor):
        raise ConfigError("x", type(x).__name__, "expected a tensor")
    if not (
        group is None
        or isinstance(group, dist.ProcessGroup)
        or group is dist.GroupMember.NON_GROUP_MEMBER
    ):
        raise ConfigError(
            "group",
            type(group).__name__,
            "expected a process group, or None for the default one",
            "mesh.group('tp') is the group of an axis",
        )
    tangent = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    if tangent is not None and members.size_of(group) > 1:  # type: ignore[arg-type]  # for mypy it may be a number
        # Otherwise the result would have only this rank's tangent.
        raise ConfigError(
            "x",
            "a tensor with a tangent",
            "collectives have no derivative in forward mode",
            "use backward() or torch.autograd.grad()",
        )
    for name, value in (("dim", dim), ("src", src)):
        if type(value) is not int and not is_whole(value):
            raise ConfigError(name, value, "expected a whole number")


def splits_of(name: str, splits: object) -> tuple[int, ...]:
    """Splits as a tuple of numbers of rows, one for each rank.

    Args:
        name: the argument, for the message.
        splits: the user's value.

    Raises:
        ConfigError: ``splits`` is not a sequence of whole numbers.
    """
    if isinstance(splits, Iterable) and not isinstance(splits, str | bytes):
        found = tuple(splits)
        if all(map(is_whole, found)):
            return tuple(map(int, found))
    raise ConfigError(name, splits, "expected a list of whole numbers, one per rank of the group")


def check_call(
    operation: str,
    x: Tensor,
    group: dist.ProcessGroup | None,
    *,
    dim: int | None = 0,
    divided: bool = False,
    settings: str = "",
    src: int = 0,
    send_splits: tuple[int, ...] | None = None,
    recv_splits: tuple[int, ...] | None = None,
    everywhere: bool,
) -> None:
    """Check this rank's call; with ``everywhere``, also that the calls of all ranks match.

    In a compiled graph, this rank's call is left to the backend to check.

    Collective: only with ``everywhere``, which costs one small all-gather.
    Args:
        operation, x, group, divided, settings, src, send_splits, recv_splits: see :class:`Signature`.
        dim: the dimension the collective works along. None: it has none, and ``x`` may be a scalar.
        everywhere: compare with the calls of the other ranks.
    Raises:
        ConfigError: the call is invalid. With ``everywhere``, it is raised on all ranks and names the ranks at fault.
    """
    size = members.size_of(group)
    if not everywhere:
        if torch.compiler.is_compiling():
            return
        # The fast path, where microseconds count: do not build a signature for a plain, valid call.
        plain = src == 0 and send_splits is None and recv_splits is None
        fits = dim == 0 and x.ndim > 0 and (not divided or x.shape[0] % size == 0)
        if plain and (dim is None or fits):
            return
    signature = Signature(
        operation=operation,
        settings=settings,
        dim=dim,
        divided=divided,
        src=src,
        dtype=str(x.dtype).removeprefix("torch."),
        device=x.device.type,
        shape=tuple(x.shape),
        needs_grad=torch.is_grad_enabled() and x.requires_grad,
        send_splits=send_splits,
        recv_splits=recv_splits,
    )
    if everywhere and size > 1:
        problem = _agree(signature.encode(size), group)
    else:
        problem = own_problem(signature, size)
    if problem is not None:
        raise ConfigError(operation, None, problem)


@bare.outside_of_graphs
def _agree(own: list[int], group: dist.ProcessGroup | None) -> str | None:
    """What is wrong with the ranks' calls; the same text on all ranks. ``torch.compile`` breaks its graph here."""
    size = members.size_of(group)
    signatures = [Signature.decode(row, size) for row in bare.gather_numbers(own, group)]
    return find_problem(signatures, members.ranks_of(group))
