"""Collectives with gradients on real ranks over Gloo: right values, right gradients, errors instead of hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from pace import pace
from rallypoint.errors import ConfigError
from rallypoint.parallel import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_dynamic,
    broadcast,
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter,
    reduce_scatter_sequence,
    scatter_to,
)
from rallypoint.testing import Ranks


pytestmark = pytest.mark.integration

# Seconds for which a rank may wait for others that compile.
COMPILING = 180.0


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    started = Ranks(request.param, group_timeout=COMPILING)
    yield started
    started.close()


@pytest.fixture(scope="module")
def two():
    started = Ranks(2, group_timeout=COMPILING)
    yield started
    started.close()


# -- what every rank can compute on its own ------------------------------------------------------------


def tensor_of(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What ``rank`` holds; any rank can compute it."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 8).to(dtype)


def splits_of(rank: int, size: int) -> list[int]:
    """Rows from ``rank`` to each rank: uneven, and sometimes none."""
    return [(rank + 2 * peer) % 3 for peer in range(size)]


def exchanged(rank: int, size: int, *rest: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What ``rank`` gets when all send as :func:`splits_of` says."""
    parts = []
    for peer in range(size):
        splits = splits_of(peer, size)
        parts.append(tensor_of(peer, sum(splits), *rest, dtype=dtype).split(splits)[rank])
    return torch.cat(parts)


# -- values --------------------------------------------------------------------------------------------


def values(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [tensor_of(r, 2 * size, 3, dtype=dtype) for r in range(size)]
    x = every[rank]
    kept = x.clone()
    blocks = [each.chunk(size)[rank] for each in every]
    assert torch.equal(all_to_all(x, checks=True), torch.cat(blocks))
    assert torch.equal(all_gather(x, checks=True), torch.cat(every))
    assert torch.equal(all_gather(x, dim=1), torch.cat(every, 1))
    assert torch.equal(gather_from(x), torch.cat(every, 1))
    for src in range(size):
        assert torch.equal(broadcast(x, src, checks=True), every[src])
    assert torch.equal(broadcast(x[0, 0], 1), every[1][0, 0])
    assert torch.equal(scatter_to(x, dim=0), x.chunk(size)[rank])
    total = torch.stack(every).sum(0, dtype=torch.float64 if dtype.is_floating_point else None)
    exact = {} if dtype is torch.float64 else {"rtol": 3e-2, "atol": 3e-2}
    for dim, found in (
        (None, all_reduce(x, checks=True)),
        (None, reduce_from(x)),
        (0, reduce_scatter(x, checks=True)),
        (1, reduce_scatter_sequence(x.t()).t() if size else x),
    ):
        wanted = total.to(dtype)
        if dim == 0 or dim == 1:
            wanted = wanted.chunk(size)[rank]
        torch.testing.assert_close(found, wanted, **exact)
    splits = splits_of(rank, size)
    y = tensor_of(rank, sum(splits), 3, dtype=dtype)
    wanted = exchanged(rank, size, 3, dtype=dtype)
    counts = [splits_of(peer, size)[rank] for peer in range(size)]
    found = all_to_all(y, send_splits=splits, recv_splits=counts, checks=True)
    assert torch.equal(found, wanted)
    for given in (splits, torch.tensor(splits, dtype=torch.int32)):
        for checks in (False, True):
            rows, received = all_to_all_dynamic(y, given, checks=checks)
            assert torch.equal(rows, wanted)
            assert received == counts
    assert torch.equal(x, kept), "an argument was changed"
    assert x.dtype == found.dtype == dtype


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint8],
    ids=str,
)
def test_values_of_every_kind(ranks, dtype):
    ranks.run(values, dtype)


def moved_types() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16):
        x = torch.arange(2 * size).add(rank).remainder(5).to(dtype)
        back = all_to_all(all_to_all(x))
        assert back.dtype == dtype
        assert back.tolist() == x.tolist()
        assert all_gather(x).chunk(size)[rank].tolist() == x.tolist()
        assert (
            broadcast(x, 1).tolist()
            == torch.arange(2 * size).add(1).remainder(5).to(dtype).tolist()
        )
        every = [torch.arange(2 * size).add(r).remainder(5).to(dtype) for r in range(size)]
        wide = torch.complex128 if dtype.is_complex else torch.float64
        total = torch.stack(every).to(wide).sum(0)
        assert all_reduce(x).tolist() == total.to(dtype).tolist()
        assert reduce_scatter(x).tolist() == total.to(dtype).chunk(size)[rank].tolist()
    mean = all_reduce(torch.full((2,), float(rank)), op="mean")
    assert mean.tolist() == [(size - 1) / 2] * 2
    part = reduce_scatter(torch.full((size,), float(rank)), op="mean")
    assert part.tolist() == [(size - 1) / 2]


def conjugates() -> None:
    """Views that are conjugated or negated only when they are read: a backend reads what is in memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [tensor_of(r, 2 * size, 4).view(2 * size, 2, 2) for r in range(size)]
    for view in (
        lambda each: torch.view_as_complex(each).conj(),
        lambda each: torch.view_as_complex(each).conj().imag,
        lambda each: torch._neg_view(each),
    ):
        views = [view(each) for each in every]
        x, size = views[rank], dist.get_world_size()
        blocks = torch.cat([each.chunk(size)[rank] for each in views])
        total = torch.stack(views).sum(0)
        for found, wanted in (
            (all_gather(x), torch.cat(views)),
            (all_gather(x, dim=1), torch.cat(views, 1)),
            (all_to_all(x), blocks),
            (all_reduce(x), total),
            (reduce_scatter(x), total.chunk(size)[rank]),
            (broadcast(x, 1), views[1]),
        ):
            torch.testing.assert_close(found, wanted)
    x = torch.view_as_complex(every[rank]).clone().requires_grad_()
    scatter_to(x, dim=0).conj().real.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_conjugated_views(ranks):
    ranks.run(conjugates)


def test_types_that_the_backend_does_not_know(ranks):
    ranks.run(moved_types)


def strided_and_empty() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for every in (
        [tensor_of(r, 3, 2 * size).t() for r in range(size)],
        [tensor_of(r, 4 * size, 3)[::2] for r in range(size)],
        [tensor_of(r, 1, 3).expand(2 * size, 3) for r in range(size)],
        [torch.empty(0, 3) for r in range(size)],
        [torch.empty(2 * size, 0) for r in range(size)],
    ):
        x = every[rank].requires_grad_()
        found = all_to_all(x)
        assert torch.equal(found, torch.cat([each.chunk(size)[rank] for each in every]))
        found.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, torch.ones_like(x))
        for collective in (all_gather, reduce_scatter, all_reduce, broadcast, gather_from):
            y = collective(x)
            assert y.is_contiguous()
            y.sum().backward(retain_graph=True)
        total = torch.stack(every).sum(0)
        assert torch.allclose(all_reduce(x), total)
        assert torch.allclose(reduce_scatter(x), total.chunk(size)[rank])
    # One rank has everything, the others nothing.
    x = tensor_of(0, size, 3) if rank == 0 else torch.empty(0, 3, dtype=torch.float64)
    x.requires_grad_()
    rows, received = all_to_all_dynamic(x, [1] * size if rank == 0 else [0] * size, checks=True)
    assert received == [1, *[0] * (size - 1)]
    assert torch.equal(rows, tensor_of(0, size, 3)[rank : rank + 1])
    rows.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    nothing, received = all_to_all_dynamic(x[:0], [0] * size)
    assert (len(nothing), received) == (0, [0] * size)


def test_strided_and_empty_tensors(ranks):
    ranks.run(strided_and_empty)


# -- gradients -------------------------------------------------------------------------------------------


class Everybody(torch.autograd.Function):
    """All ranks' calls as one function of all ranks' arguments, which each rank evaluates.

    ``shared_in``: all ranks have the same argument. ``shared_out``: all have the same result, which counts once.
    """

    @staticmethod
    def forward(ctx, call, shared_in, shared_out, *xs):
        ctx.me, ctx.shared_in, ctx.shared_out = dist.get_rank(), shared_in, shared_out
        ctx.x = xs[0 if shared_in else ctx.me].detach().clone().requires_grad_()
        with torch.enable_grad():
            ctx.y = call(ctx.x)
        return (ctx.y.detach().clone(),) if shared_out else tuple(from_all(ctx.y.detach()))

    @staticmethod
    def backward(ctx, *grads):
        grad = grads[0 if ctx.shared_out else ctx.me]
        (found,) = torch.autograd.grad(ctx.y, ctx.x, grad, retain_graph=True)
        return None, None, None, *((found,) if ctx.shared_in else from_all(found))


def from_all(x: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors, whatever their shapes."""
    sent = torch.zeros(66, dtype=x.dtype)  # its shape, then its elements
    sent[0], sent[1] = [*x.shape, 1][:2]
    sent[2 : 2 + x.numel()] = x.flatten()
    found = [torch.zeros_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(found, sent)
    shapes = [[int(each) for each in shape] for shape in torch.stack(found)[:, :2].tolist()]
    return [
        each[2 : 2 + rows * columns].view((rows, columns)[: x.ndim])
        for each, (rows, columns) in zip(found, shapes, strict=True)
    ]


def check_gradient(call, xs, *, shared_in: bool = False, shared_out: bool = False) -> None:
    given = [x.clone().requires_grad_() for x in (xs[:1] if shared_in else xs)]
    torch.manual_seed(0)  # the fast mode draws directions, the same ones on all ranks
    assert torch.autograd.gradcheck(
        lambda *each: Everybody.apply(call, shared_in, shared_out, *each),
        given,
        check_undefined_grad=False,
        fast_mode=dist.get_world_size() > 2,  # otherwise every entry of the Jacobian
    )


def gradients_of_the_sum_of_losses() -> None:
    size = dist.get_world_size()
    xs = [tensor_of(r, size, 2) for r in range(size)]
    for call in (
        all_to_all,
        all_gather,
        lambda x: all_gather(x, dim=1),
        reduce_scatter,
        lambda x: reduce_scatter(x.t(), dim=1),
        lambda x: reduce_scatter(x, op="mean"),
        all_reduce,
        lambda x: all_reduce(x, op="mean"),
        lambda x: broadcast(x, size - 1),
        lambda x: gather_sequence(x, dim=1),
        lambda x: reduce_scatter_sequence(x, dim=0),
    ):
        check_gradient(call, xs)


def test_gradients_are_those_of_the_sum_of_the_ranks_losses(ranks):
    ranks.run(gradients_of_the_sum_of_losses)


def gradients_of_uneven_exchanges() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    send = splits_of(rank, size)
    recv = [splits_of(peer, size)[rank] for peer in range(size)]
    xs = [tensor_of(r, sum(splits_of(r, size)), 1) for r in range(size)]
    check_gradient(lambda x: all_to_all(x, send_splits=send, recv_splits=recv), xs)
    check_gradient(lambda x: all_to_all_dynamic(x, send)[0], xs)


def test_gradients_of_uneven_exchanges(ranks):
    ranks.run(gradients_of_uneven_exchanges)


def gradients_of_one_loss() -> None:
    size = dist.get_world_size()
    xs = [tensor_of(r, 2, size) for r in range(size)]
    check_gradient(copy_to, xs, shared_in=True)
    check_gradient(scatter_to, xs, shared_in=True)
    check_gradient(reduce_from, xs, shared_out=True)
    check_gradient(gather_from, xs, shared_out=True)
    # A layer divided by columns, then one divided by rows: as if neither were divided.
    check_gradient(lambda x: reduce_from(copy_to(x) ** 2), xs, shared_in=True, shared_out=True)
    check_gradient(lambda x: gather_from(scatter_to(x) ** 2), xs, shared_in=True, shared_out=True)


def test_gradients_of_conjugate_pairs_are_those_of_one_loss(ranks):
    ranks.run(gradients_of_one_loss)


def second_gradients() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [tensor_of(r, size) for r in range(size)]
    x, total = every[rank].requires_grad_(), torch.stack(every).sum(0)

    def twice(loss):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (found,) = torch.autograd.grad((grad**2).sum(), x)
        return found

    torch.testing.assert_close(twice((all_to_all(x) ** 3).sum()), 36 * x**3)
    torch.testing.assert_close(twice((all_gather(x) ** 3).sum()), 36 * size**2 * x**3)
    torch.testing.assert_close(twice((all_reduce(x) ** 3).sum()), 36 * size**3 * total**3)
    part = twice((reduce_scatter(x) ** 3).sum())
    torch.testing.assert_close(part, 36 * size * total**3)
    torch.testing.assert_close(
        twice((broadcast(x, 1) ** 3).sum()),
        36 * size**2 * x**3 if rank == 1 else torch.zeros_like(x),
    )


def test_gradients_of_gradients(ranks):
    ranks.run(second_gradients)


def parallel_layers() -> None:
    """Two layers, divided by columns and by rows, with and without sequence parallelism, against the whole."""
    rank, size = dist.get_rank(), dist.get_world_size()
    width = 2 * size
    x, first = tensor_of(0, 2, size, 3), tensor_of(1, 3, width)
    second, bias = tensor_of(2, width, 3), tensor_of(3, 3)
    whole = [each.clone().requires_grad_() for each in (x, first, second, bias)]
    loss = ((torch.tanh(whole[0] @ whole[1] / 8) @ whole[2] + whole[3]) ** 2).sum()
    loss.backward()
    for sequence in (False, True):
        part = [
            (x.chunk(size, 1)[rank] if sequence else x).clone().requires_grad_(),
            first.chunk(size, 1)[rank].clone().requires_grad_(),
            second.chunk(size, 0)[rank].clone().requires_grad_(),
            bias.clone().requires_grad_(),
        ]
        if sequence:
            hidden = torch.tanh(gather_sequence(part[0]) @ part[1] / 8)
            out = reduce_scatter_sequence(hidden @ part[2]) + part[3]
        else:
            hidden = torch.tanh(copy_to(part[0]) @ part[1] / 8)
            out = reduce_from(hidden @ part[2]) + part[3]
        found = (out**2).sum()
        found.backward()
        if sequence:
            found = all_reduce(found.detach())
            part[3].grad = all_reduce(part[3].grad)
        torch.testing.assert_close(found, loss)
        wanted = [each.grad for each in whole]
        if sequence:
            wanted[0] = wanted[0].chunk(size, 1)[rank]
        wanted[1] = wanted[1].chunk(size, 1)[rank]
        wanted[2] = wanted[2].chunk(size, 0)[rank]
        for each, grad in zip(part, wanted, strict=True):
            torch.testing.assert_close(each.grad, grad)


def test_divided_layers_equal_the_whole(ranks):
    ranks.run(parallel_layers)


# -- mistakes --------------------------------------------------------------------------------------------


def mistakes() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    odd = rank == 1
    x = torch.zeros(2 * size, 3)
    last = size - 1
    calls = [
        lambda: (all_gather if odd else all_reduce)(x, checks=True),
        lambda: all_to_all(x.double() if odd else x, checks=True),
        lambda: all_to_all(x[:, :2] if odd else x, checks=True),
        lambda: all_to_all(x[1:] if odd else x, checks=True),
        lambda: all_to_all(x[size:] if odd else x, checks=True),
        lambda: all_gather(x[0] if odd else x, checks=True),
        lambda: all_gather(x, dim=1 if odd else 0, checks=True),
        lambda: all_gather(x, dim=5 if odd else 0, checks=True),
        lambda: broadcast(x, last if odd else 0, checks=True),
        lambda: broadcast(x, 7 if odd else 0, checks=True),
        lambda: all_reduce(x, op="mean" if odd else "sum", checks=True),
        lambda: reduce_scatter(x.clone().requires_grad_(odd), checks=True),
        lambda: all_to_all(
            x,
            send_splits=[2] * size,
            recv_splits=[2] * (size - 1) + [3 if odd else 2],
            checks=True,
        ),
        lambda: all_to_all(x, send_splits=[2] * (size + odd), recv_splits=[2] * size, checks=True),
        lambda: all_to_all(
            x,
            send_splits=None if odd else [2] * size,
            recv_splits=None if odd else [2] * size,
            checks=True,
        ),
        lambda: all_to_all_dynamic(x, [2 + odd] * size, checks=True),
        lambda: all_to_all_dynamic(x, torch.tensor([2 + odd] * size), checks=True),
        lambda: scatter_to(x[:, :2] if odd else x, dim=0, checks=True),
        lambda: copy_to(x[:, :2] if odd else x, checks=True),
    ]
    found = []
    for call in calls:
        try:
            call()
        except ConfigError as error:
            found.append(str(error))
        else:
            found.append("no error")
    # Nothing hangs in the group: it goes on.
    assert all_reduce(torch.ones(1)).item() == size
    return found


def test_mistakes_are_an_error_on_every_rank_that_names_the_ranks(ranks):
    size = ranks.world_size
    others = "rank 0" if size == 2 else f"ranks {', '.join(str(r) for r in range(size) if r != 1)}"
    found = ranks.run(mistakes)
    for here in found:
        for text, first in zip(here, found[0], strict=True):
            # The messages are the same except for the name of the function that was called.
            assert text.partition(": ")[2] == first.partition(": ")[2]
            assert "rank 1" in text, text
    mine = found[0]
    assert f"all_reduce on {others}; all_gather on rank 1" in mine[0]
    assert f"float32 on {others}; float64 on rank 1" in mine[1]
    assert "rank 1: dimension 0 of x is" in mine[3]
    assert f"rank {size - 1} sends 2 rows to rank 1, which expects 3" in mine[12]
    assert f"rank 1: send_splits [{', '.join(['3'] * size)}] add up to {3 * size} rows" in mine[15]


def calls_of_no_member() -> list[str]:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return []
    found = []
    for call in (
        *(all_gather, all_reduce, all_to_all, broadcast, copy_to, gather_from, gather_sequence),
        *(reduce_from, reduce_scatter, reduce_scatter_sequence, scatter_to),
        lambda x, group: all_to_all_dynamic(x, [1], group),
        lambda x, group: all_reduce(x, group, checks=True),
    ):
        with pytest.raises(ConfigError) as caught:
            call(torch.ones(2, 2), group=group)
        found.append(str(caught.value))
    return found


def test_a_collective_of_a_group_without_this_rank_is_an_error(two):
    for text in two.run(calls_of_no_member)[1]:
        assert "rank 1 is not a member" in text, text


def derivatives_in_forward_mode() -> None:
    x = torch.ones(2, 2)
    # torch.func.grad and vjp refuse them as well.
    advice = r"no derivative in forward mode.*use backward\(\) or torch\.autograd\.grad\(\)"
    for call in (all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, scatter_to):
        with pytest.raises(ConfigError, match=advice):
            torch.func.jvp(call, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(ConfigError, match="no derivative in forward mode"):
            all_reduce(dual)
        assert torch.equal(all_reduce(x), 2 * x), "a constant"


def test_a_derivative_in_forward_mode_is_an_error(two):
    two.run(derivatives_in_forward_mode)


# -- other groups, other devices ---------------------------------------------------------------------------


def as_in_the_default_group(backend: str) -> None:
    """The same in a group of its own: on GPUs, where there is one for each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    group = dist.new_group(list(range(size)), backend=backend)
    send = splits_of(rank, size)
    recv = [splits_of(peer, size)[rank] for peer in range(size)]

    def uneven(x, group, checks):
        y = all_to_all(x[: sum(send)], group, send_splits=send, recv_splits=recv, checks=checks)
        z, _ = all_to_all_dynamic(
            x[: sum(send)], torch.tensor(send, device=x.device), group, checks=checks
        )
        return y * z

    def sent(x, group, checks):
        return broadcast(x, 1, group, checks=checks)

    plain = [
        *(all_to_all, all_gather, reduce_scatter, all_reduce, uneven, sent),
        *(copy_to, reduce_from, gather_sequence, gather_from),
    ]
    for call in plain:
        found = []
        for where, over in ((torch.device("cpu"), None), (device, group)):
            x = tensor_of(rank, 3 * size, 2).to(where).requires_grad_()
            y = call(x, over, checks=True)
            (y**2).sum().backward()
            found.append((y.detach().cpu(), x.grad.cpu()))
        torch.testing.assert_close(found[1], found[0])
    for dtype in (torch.bfloat16, torch.int16, torch.bool, torch.float8_e4m3fn):
        x = torch.arange(2 * size, device=device).remainder(3).to(dtype)
        assert all_to_all(all_to_all(x, group), group).tolist() == x.tolist()
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "backend",
    [
        "gloo",
        pytest.param(
            "nccl",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
            ],
        ),
    ],
)
def test_a_group_of_its_own(two, backend):
    two.run(as_in_the_default_group, backend)


# -- a peer is lost ------------------------------------------------------------------------------------------


def lose(how: int) -> tuple[float, str] | None:
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    x = torch.ones(4, 3, requires_grad=True)
    y = all_to_all(x) + all_reduce(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), how)
    began = time.monotonic()
    try:
        y.sum().backward()
    except RuntimeError as error:
        return time.monotonic() - began, str(error)
    finally:
        if dist.get_rank() == dist.get_world_size() - 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[1], signal.SIGKILL)  # a stopped process keeps its sockets open
    return None


@pytest.mark.faults
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_peer_that_is_lost_ends_the_others_within_the_groups_time_out(how):
    limit = 2.0
    ranks = Ranks(4, group_timeout=limit)
    try:
        found = ranks.outcomes(lose, how, limit=15)
    finally:
        ranks.close()
    for rank in (0, 2, 3):
        succeeded, outcome = found[rank]
        assert succeeded, outcome
        assert outcome is not None, "the backward pass went through without the lost rank"
        seconds, _text = outcome
        assert seconds < limit + 3 * pace()
    assert not found[1][0]


# -- compiled ----------------------------------------------------------------------------------------------


def compiled(backend: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    send = splits_of(rank, size)
    recv = [splits_of(peer, size)[rank] for peer in range(size)]
    group = dist.new_group(list(range(size)))

    def step(x):
        y = torch.tanh(all_to_all(x, group))
        y = all_gather(y, dim=1) * all_reduce(x, op="mean").sum()
        y = reduce_scatter(y * 2, group, dim=1)
        y = y + broadcast(x, 1)
        y = reduce_from(copy_to(y) * (rank + 1), group)
        y = gather_from(scatter_to(y, dim=0), dim=0) ** 2
        z = all_to_all(y[: sum(send)], group, send_splits=send, recv_splits=recv)
        return y.sum() + (z**2).sum()

    def run(function):
        x = tensor_of(rank, 3 * size, 4).requires_grad_()
        loss = function(x)
        loss.backward()
        return loss.detach(), x.grad

    torch.compiler.reset()
    wanted = run(step)
    found = run(torch.compile(step, backend=backend, fullgraph=True))
    torch.testing.assert_close(found, wanted)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_one_graph_and_the_same_numbers_under_compile(two, backend):
    two.run(compiled, backend, limit=COMPILING)


def compiled_with_breaks() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    send = splits_of(rank, size)

    def step(x):
        rows, received = all_to_all_dynamic(x * 2, send)
        back = all_to_all(rows**2, send_splits=received, recv_splits=send, checks=True)
        return back.sum()

    x = tensor_of(rank, sum(send), 4).requires_grad_()
    torch.compiler.reset()
    torch.compile(step, backend="aot_eager")(x).backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())


def test_what_breaks_the_graph_still_computes_the_same(two):
    two.run(compiled_with_breaks, limit=COMPILING)


def compiled_in_a_part() -> None:
    """In a group whose ranks are not those of the job, each of which sends in turn."""
    members = [1, 2]
    group = dist.new_group(members)
    rank = dist.get_rank()
    if rank in members:
        for src in range(2):
            x = torch.full((2,), float(rank), requires_grad=True)
            torch.compiler.reset()
            step = torch.compile(
                lambda x, src=src: broadcast(x, src, group), backend="aot_eager", fullgraph=True
            )
            out = step(x)
            assert out.tolist() == [float(members[src])] * 2
            out.sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [2.0 if rank == members[src] else 0.0] * 2
    dist.barrier()
    if rank in members:
        dist.destroy_process_group(group)


def test_a_compiled_broadcast_comes_from_the_groups_own_rank(ranks):
    if ranks.world_size == 3:
        ranks.run(compiled_in_a_part, limit=COMPILING)
