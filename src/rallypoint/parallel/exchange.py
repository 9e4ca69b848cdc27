"""All-to-all: with equal splits, with given splits, or with splits that only the sender knows.

[Note: Gradients] Unless a function says otherwise, its gradient is that of the *sum of all ranks' losses*: rank r's
``x.grad`` is the derivative of that sum with respect to r's ``x``. This makes a model spread over ranks train
correctly when each rank calls ``backward`` on its own part of the loss. Backward passes are collectives themselves,
so all ranks of the group must run them, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rallypoint.errors import ConfigError

from . import bare, checks as checking, members
from .bare import Group
from .signatures import ALL_TO_ALL, ALL_TO_ALL_DYNAMIC


def all_to_all(
    x: Tensor,
    group: Group = None,
    *,
    send_splits: Sequence[int] | None = None,
    recv_splits: Sequence[int] | None = None,
    checks: bool = False,
) -> Tensor:
    """Exchange rows of ``x`` between the ranks of ``group``; differentiable.

    Collective: all ranks of ``group`` call it, in the same order.   Blocks: until peers have sent (NCCL: only the stream blocks).
    Args:
        x: ``[rows, ...]``, any dtype, on the group's device. The first ``send_splits[0]`` rows go to rank 0 of the
            group, and so on. ``x`` need not be contiguous, and may have no rows.
        group: default: the default group. In a group of one, or without a default group, ``x`` itself is returned.
        send_splits: number of rows to send to each rank, in group-rank order. Default: equal parts.
        recv_splits: number of rows that each rank sends to this one. Required if ``send_splits`` is given.
        checks: first compare the calls of all ranks. Costs one small all-gather.
    Returns:
        ``[sum(recv_splits), ...]``, with rows grouped by source rank. Without splits, as many rows as ``x``.
    Raises:
        ConfigError: rows and splits do not match on this rank; with ``checks``, on any rank, and then raised on all.
        RuntimeError: from the backend: a peer died, or did not call within the group's timeout.
    Gradient: the same exchange with the splits swapped: each row's gradient returns to the row's source rank. It is
        the gradient of the sum of all ranks' losses ([Note: Gradients]).
    Source: GShard (arXiv 2006.16668), for its use with experts.
    """
    checking.check_types(x, group)
    if send_splits is None and recv_splits is None and not checks and bare.is_plain(x):
        # The fast path for the most frequent call: microseconds show even at 1 MB.
        size = members.size_of(group)
        if x.shape[0] % size == 0:
            return x if size == 1 else bare.exchange_plainly(x, group)
    send = None if send_splits is None else checking.splits_of("send_splits", send_splits)
    recv = None if recv_splits is None else checking.splits_of("recv_splits", recv_splits)
    checking.check_call(
        ALL_TO_ALL,
        x,
        group,
        divided=send is None,
        send_splits=send,
        recv_splits=recv,
        everywhere=checks,
    )
    if members.size_of(group) == 1:
        return x
    return _exchanged(x, recv, send, group)


def all_to_all_dynamic(
    x: Tensor,
    send_splits: Sequence[int] | Tensor,
    group: Group = None,
    *,
    checks: bool = False,
) -> tuple[Tensor, list[int]]:
    """Exchange rows of ``x`` with splits that only the sender knows; differentiable.

    The ranks exchange their splits first. To return the rows, call :func:`all_to_all` with the two kinds of splits swapped.

    Collective: every rank of ``group`` calls it, in the same order.   Blocks: until peers have sent; on a GPU, also until
    the splits have reached the CPU. ``torch.compile`` breaks its graph here.
    Args:
        x: ``[rows, ...]``, any dtype, on the group's device, as in :func:`all_to_all`.
        send_splits: number of rows to send to each rank, as numbers or as an integer tensor ``[size]``.
        group, checks: as in :func:`all_to_all`.
    Returns:
        The received rows, ``[sum(received), ...]``, grouped by source rank; and the number of rows from each rank.
    Raises:
        ConfigError, RuntimeError: as :func:`all_to_all`.
    Gradient: as :func:`all_to_all`. The splits have none.
    """
    checking.check_types(x, group)
    send, recv = _exchange_splits(send_splits, x, group, checks=checks)
    if members.size_of(group) == 1:
        return x, list(recv)
    return _exchanged(x, recv, send, group), list(recv)


@bare.outside_of_graphs
def _exchange_splits(
    send_splits: Sequence[int] | Tensor, x: Tensor, group: Group, *, checks: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """This rank's splits, and the numbers of rows that the other ranks send to it."""
    if not isinstance(send_splits, Tensor):
        send = checking.splits_of("send_splits", send_splits)
        checking.check_call(ALL_TO_ALL_DYNAMIC, x, group, send_splits=send, everywhere=checks)
        if members.size_of(group) == 1:
            return send, send
        own = torch.tensor(send, dtype=torch.int64, device=x.device)
        return send, tuple(bare.exchange(own, None, None, group).tolist())
    if send_splits.is_floating_point():
        raise ConfigError("send_splits", None, f"expected whole numbers, not {send_splits.dtype}")
    own = send_splits.detach().to(x.device, torch.int64).flatten()
    size = members.size_of(group)
    if checks or size == 1 or len(own) != size:
        return _exchange_splits(own.tolist(), x, group, checks=checks)
    # Wait for the device once instead of twice: both tensors are already there.
    both = torch.stack([own, bare.exchange(own, None, None, group)]).tolist()
    send, recv = tuple(both[0]), tuple(both[1])
    checking.check_call(ALL_TO_ALL_DYNAMIC, x, group, send_splits=send, everywhere=False)
    return send, recv


def _exchanged(
    x: Tensor, recv: tuple[int, ...] | None, send: tuple[int, ...] | None, group: Group
) -> Tensor:
    if not bare.needs_grad(x):
        return bare.exchange(x, recv, send, group)
    found: Tensor = _AllToAll.apply(x, recv, send, group)  # type: ignore[no-untyped-call]
    return found


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # Any: torch has no public type for it
        x: Tensor,
        recv: tuple[int, ...] | None,
        send: tuple[int, ...] | None,
        group: Group,
    ) -> Tensor:
        ctx.back = (send, recv, group)
        return bare.exchange(x, recv, send, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], *ctx.back), None, None, None
