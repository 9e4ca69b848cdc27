"""Ranks tell each other what they are about to do, before any of them waits for the others to do it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rallypoint.errors import ConfigError

from . import bare, members
from .signatures import Signature, find_problem, own_problem


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
