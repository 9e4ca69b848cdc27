"""Ranks tell each other what they are about to do, before any of them waits for the others to do it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from rallypoint._core.whole_numbers import is_whole
from rallypoint.errors import ConfigError

from . import bare, members
from .signatures import Signature, find_problem, own_problem


def check_types(x: object, group: object, dim: object = 0, src: object = 0) -> None:
    """Raise if an argument is of a type that cannot be. In a compiled graph nothing is checked.

    Raises:
        ConfigError: which one it is, and what was expected.
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
            "mesh.group('tp') is that of an axis",
        )
    for name, value in (("dim", dim), ("src", src)):
        if type(value) is not int and not is_whole(value):
            raise ConfigError(name, value, "expected a whole number")


def splits_of(name: str, splits: object) -> tuple[int, ...]:
    """Numbers of rows, one for each rank.

    Raises:
        ConfigError: they are something else.
    """
    if isinstance(splits, Iterable) and not isinstance(splits, str | bytes):
        found = tuple(splits)
        if all(map(is_whole, found)):
            return tuple(map(int, found))
    raise ConfigError(
        name, splits, "expected a list of whole numbers, one for each rank of the group"
    )


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
    """Raise if this rank's call cannot be; with ``everywhere`` if the ranks' calls do not go together.

    In a compiled graph a rank's own call is not checked; the backend still does.

    Collective: with ``everywhere``, and then it costs one small all-gather.
    Args:
        operation, x, divided, settings, src, send_splits, recv_splits: see :class:`Signature`.
        dim: None: the collective has no dimension of its own, and ``x`` need not have any.
        everywhere: ask the others.
    Raises:
        ConfigError: what is wrong, and with ``everywhere`` on which ranks; then on all of them.
    """
    size = members.size_of(group)
    if not everywhere:
        if torch.compiler.is_compiling():
            return
        # Microseconds count here: a plain call is not described before it is found to be fine.
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
    """What is wrong with the calls of all ranks: the same on each of them. ``torch.compile`` breaks its graph here."""
    size = members.size_of(group)
    signatures = [Signature.decode(row, size) for row in bare.gather_numbers(own, group)]
    return find_problem(signatures, members.ranks_of(group))
