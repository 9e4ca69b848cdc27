"""Every rank sends rows to every other: equally many, as many as was said, or as many as it turns out.

[Note: Gradients] Unless a function says otherwise its gradient is that of the *sum over all ranks of their
losses*: what rank r gets in ``x.grad`` is how much that sum changes with r's ``x``. This is what makes a
model that is spread over ranks right when each rank calls ``backward`` on its own part of the loss. All backward passes are
collectives themselves, so they must be run on all ranks of the group, in the same order.
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

    Collective: every rank of ``group`` calls it, in the same order.   Blocks: until peers have sent (NCCL: the stream does).
    Args:
        x: ``[rows, ...]``, any dtype, on the group's device; the first ``send_splits[0]`` rows go to rank 0 of the
            group, and so on. It need not be contiguous, and may have no rows.
        group: default: the default group; without any, and in a group of one, ``x`` itself is returned.
        send_splits: rows for each rank of the group. Default: equally many.
        recv_splits: rows from each rank: what it sends to this one. Given if and only if ``send_splits`` is.
        checks: first ask all ranks whether their calls go together. Costs one small all-gather.
    Returns:
        ``[sum(recv_splits), ...]``, the rows grouped by the rank they come from; as many as in ``x`` without splits.
    Raises:
        ConfigError: rows and splits do not go together on this rank; with ``checks`` on any rank, and then on all of them.
        RuntimeError: from the backend: a peer died, or did not come within the group's time-out.
    Gradient: the same exchange backwards (splits swapped): each row's gradient returns to the rank it came from. It
        is that of the sum over ranks of the losses ([Note: Gradients]).
    Source: GShard (arXiv 2006.16668) for its use with experts.
    """
    checking.check_types(x, group)
    if send_splits is None and recv_splits is None and not checks and bare.is_plain(x):
        # The most frequent call does little beside the collective: microseconds are seen at 1 MB.
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
    """Exchange rows of ``x`` where only the sender knows how many; differentiable.

    The splits are exchanged first. The way back is ``all_to_all`` with the two kinds of splits swapped.

    Collective: every rank of ``group`` calls it, in the same order.   Blocks: until peers have sent; with a GPU also until
    the splits are known on the CPU. ``torch.compile`` breaks its graph here.
    Args:
        x: as in :func:`all_to_all`.
        send_splits: rows for each rank of the group, as numbers or as a tensor ``[size]`` of whole numbers.
        group, checks: as in :func:`all_to_all`.
    Returns:
        The rows, ``[sum(received), ...]``, grouped by the rank they come from; and how many came from each.
    Raises:
        As :func:`all_to_all`.
    Gradient: as :func:`all_to_all`; the splits have none.
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
    """The splits as numbers: those of this rank, and what the others send to it."""
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
    # One wait for the device, not two: both are on it already.
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
