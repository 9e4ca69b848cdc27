"""GPU tensors between two processes of one host that use the same GPU: shared by CUDA IPC, and staged."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rpc_workers
from rallypoint import rpc
from rallypoint.rpc.serialization import cuda_ipc
from rpc_workers import Workers


pytestmark = [
    pytest.mark.integration,
    pytest.mark.gpu,
    # Not is_available(): it asks the driver for things that a fork of this process cannot use.
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
]

LARGE = 1 << 20
LIMIT = 60.0  # seconds; starting CUDA takes some
MAPS = {"w0": {0: 0}, "w1": {0: 0}}
log: list[str] = []


class Watched(cuda_ipc.CudaMemory):
    """Notes which way a tensor took."""

    def stage(self, flat: Tensor) -> Tensor:
        log.append("stage")
        return super().stage(flat)

    def share(self, flat: Tensor) -> cuda_ipc.Block:
        found = super().share(flat)
        log.append("share")
        return found

    def open(self, index: int, block: cuda_ipc.Block) -> Tensor:
        log.append("open")
        return super().open(index, block)


def begin(maps: Any, **options: Any) -> None:
    cuda_ipc.memory = Watched()
    rpc_workers.join(device_maps=maps, **options)


def workers_with(maps: Any = MAPS, **options: Any) -> Iterator[Workers]:
    with Workers(2) as workers:
        workers.run(functools.partial(begin, maps, **options), limit=LIMIT)
        yield workers
        workers.run(rpc_workers.leave)


@pytest.fixture
def shared() -> Iterator[Workers]:
    yield from workers_with()


@pytest.fixture(params=["shared", "staged", "tcp"])
def two(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Two workers, for each way that tensors take."""
    options: dict[str, Any] = {
        "shared": {},
        "staged": {"cuda_ipc": False},
        "tcp": {"transports": ("tcp",)},
    }[request.param]
    for workers in workers_with(**options):
        yield workers
        ways = set(workers.on(0, what_was_done)) | set(workers.on(1, what_was_done))
        assert ways == ({"share", "open"} if request.param == "shared" else {"stage"})


def what_was_done() -> list[str]:
    found = list(log)
    log.clear()
    return found


def doubled(x: Any) -> Any:
    return 2 * x


def echo(x: Any) -> Any:
    return x


def total_on_a_stream_of_its_own(x: Tensor, seconds: float = 0.0) -> float:
    time.sleep(seconds)
    assert x.is_cuda
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(x.sum(dtype=torch.float64))


def late(value: float) -> Tensor:
    """A tensor that is written to about a second from now."""
    made = torch.zeros(LARGE, device="cuda:0")
    torch.cuda._sleep(2_000_000_000)
    return made.fill_(value)


def overwrite_later() -> Tensor:
    """The result is written to as soon as it has been sent."""
    return _kept


_kept: Any = None


def keep(x: Tensor) -> None:
    global _kept
    _kept = x


def zero_kept() -> None:
    _kept.zero_()


def items(count: int) -> Iterator[Tensor]:
    made = torch.empty(LARGE, device="cuda:0")
    for i in range(count):
        yield made.fill_(i)


def allocated() -> int:
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated()


def test_tensors_go_there_and_back(two):
    def case():
        x = torch.arange(LARGE, device="cuda:0")
        assert torch.equal(rpc.rpc_sync("w1", doubled, (x,)), 2 * x)
        assert torch.equal(rpc.rpc_async("w1", doubled, (x,)).wait(), 2 * x)
        found = rpc.remote("w1", doubled, (x,)).to_here()
        assert found.device == x.device
        assert torch.equal(found, 2 * x)
        sums = [float(each.sum()) for each in rpc.rpc_stream("w1", items, (20,))]
        assert sums == [i * LARGE for i in range(20)]

    two.on(0, case, limit=LIMIT)
    two.on(1, lambda: rpc.rpc_sync("w0", doubled, (torch.ones(LARGE, device="cuda:0"),)))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.view(1024, -1).t(),
        lambda x: x.view(1024, -1)[512:],
        lambda x: x.view(1024, -1)[:, ::7],
        lambda x: x[7:300_007],
        lambda x: x.view(16, 16, -1).permute(2, 0, 1)[1:],
        lambda x: x[:100_000].expand(3, -1),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to(torch.complex64).conj(),
    ],
    ids=["transposed", "half", "columns", "part", "permuted", "expanded", "bf16", "conjugate"],
)
def test_views_keep_values_and_strides(two, make):
    def case(make):
        x = make(torch.arange(LARGE, device="cuda:0", dtype=torch.float32))
        found = rpc.rpc_sync("w1", echo, (x,))
        assert torch.equal(found, x)
        assert found.stride() == x.stride()

    two.on(0, case, make, limit=LIMIT)


def test_what_shares_memory_shares_it_over_there(two):
    def case():
        x = torch.zeros(1024, 1024, device="cuda:0")
        whole, turned = rpc.rpc_sync("w1", echo, ([x, x.t()],))
        whole[2, 3] = 5
        assert turned[3, 2] == 5

    two.on(0, case, limit=LIMIT)


def test_the_sender_may_overwrite_a_tensor_when_the_call_has_left(two):
    def case():
        x = torch.ones(LARGE, device="cuda:0")
        sums = []
        for i in range(1, 6):
            x.fill_(i)
            sums.append(rpc.rpc_async("w1", total_on_a_stream_of_its_own, (x, 0.1)))
        x.zero_()
        torch.cuda.synchronize()
        assert [each.wait() for each in sums] == [i * LARGE for i in range(1, 6)]
        rpc.rpc_sync("w1", keep, (torch.full_like(x, 3),))
        answer = rpc.rpc_async("w1", overwrite_later)
        rpc.rpc_sync("w1", zero_kept)
        first = float(answer.wait().sum())
        assert first in (0.0, 3.0 * LARGE)  # one or the other, nothing in between
        # What arrived is a copy.
        again = rpc.rpc_sync("w1", overwrite_later)
        again.fill_(9)
        assert float(rpc.rpc_sync("w1", overwrite_later).sum()) == 0

    two.on(0, case, limit=LIMIT)


def test_what_is_still_being_written_arrives_written(two):
    def case():
        rpc.rpc_sync("w1", echo, (torch.zeros(LARGE, device="cuda:0"),))  # to start CUDA
        for value in (1.0, 2.0):
            x = late(value)
            assert rpc.rpc_sync("w1", total_on_a_stream_of_its_own, (x,)) == value * LARGE
            assert float(rpc.rpc_sync("w1", late, (value,)).sum()) == value * LARGE
        with torch.cuda.stream(torch.cuda.Stream()):
            x = late(3.0)
            assert rpc.rpc_sync("w1", total_on_a_stream_of_its_own, (x,)) == 3 * LARGE

    two.on(0, case, limit=LIMIT)


def test_256_mib(two):
    def case():
        x = torch.randint(0, 255, (256 << 20,), dtype=torch.uint8, device="cuda:0")
        assert torch.equal(rpc.rpc_sync("w1", echo, (x,)), x)

    two.on(0, case, limit=LIMIT)


def test_blocks_are_free_again(shared):
    def case():
        x = torch.ones(16 * LARGE, device="cuda:0")
        rpc.rpc_sync("w1", echo, (x,))
        before = allocated(), rpc.rpc_sync("w1", allocated)
        for _ in range(50):
            rpc.rpc_sync("w1", echo, (x,))
        with pytest.raises(AttributeError):
            rpc.rpc_sync("w1", total_on_a_stream_of_its_own, ([x],))
        with pytest.raises(rpc.RpcTimeout):
            rpc.rpc_sync("w1", total_on_a_stream_of_its_own, (x, 0.5), timeout=0.1)
        time.sleep(1.0)
        rpc.rpc_sync("w1", echo, (1,))
        assert (allocated(), rpc.rpc_sync("w1", allocated)) == before

    shared.on(0, case, limit=LIMIT)


def be_blind() -> None:
    cuda_ipc.memory.find = lambda gpu: None  # type: ignore[method-assign]


def test_what_cannot_be_opened_says_what_to_do_and_is_free_again(shared):
    def case():
        x = torch.ones(16 * LARGE, device="cuda:0")
        before = allocated()
        rpc.rpc_sync("w1", be_blind)
        for _ in range(3):
            with pytest.raises(
                rpc.RpcError, match="which this process cannot see; set the option cuda_ipc=False"
            ):
                rpc.rpc_sync("w1", echo, (x,))
        assert allocated() == before

    shared.on(0, case, limit=LIMIT)


def test_memory_in_expandable_segments_arrives(shared):
    def case():
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        x = torch.arange(32 * LARGE, device="cuda:0")
        assert torch.equal(rpc.rpc_sync("w1", echo, (x,)), x)

    shared.on(0, case, limit=LIMIT)


def test_a_call_to_oneself_copies_on_the_gpu(shared):
    def case():
        x = torch.ones(LARGE, device="cuda:0")
        found = rpc.rpc_sync("w0", echo, (x,))
        found.zero_()
        assert float(x.sum()) == LARGE
        assert what_was_done() == []

    shared.on(0, case, limit=LIMIT)


def test_without_a_map_a_tensor_is_refused():
    for workers in workers_with(maps={}):

        def case():
            with pytest.raises(ValueError, match="there is no device map"):
                rpc.rpc_sync("w1", echo, (torch.ones(3, device="cuda:0"),))
            assert rpc.rpc_sync("w1", echo, (3,)) == 3

        workers.on(0, case, limit=LIMIT)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("ipc", [True, False], ids=["shared", "staged"])
def test_a_map_that_turns_devices_round(ipc):
    for workers in workers_with({"w1": {0: 1, 1: 0}}, cuda_ipc=ipc):

        def case():
            for index in (0, 1):
                x = torch.arange(LARGE, device=f"cuda:{index}")
                device, found = rpc.rpc_sync("w1", device_and_double, (x,))
                assert device == f"cuda:{1 - index}"
                assert found.device == x.device
                assert torch.equal(found, 2 * x)

        workers.on(0, case, limit=LIMIT)


def device_and_double(x: Tensor) -> tuple[str, Tensor]:
    return str(x.device), 2 * x
