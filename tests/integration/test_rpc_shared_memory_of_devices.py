"""Blocks that are shared between workers, with a device that is made of files: each is counted down once, always."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rpc_workers
from rallypoint import rpc
from rallypoint.rpc.device_map import Device
from rallypoint.rpc.serialization import cuda_ipc, payload
from rallypoint.rpc.serialization.cuda_ipc import Block
from rallypoint.rpc.serialization.tensor_writer import SMALL, TensorWriter
from rpc_workers import Workers, eventually


pytestmark = [pytest.mark.integration]

LARGE = 50_000
log: list[str] = []


class Files:
    """Memory that other processes open by a file's name; the file is there until it is counted down."""

    kinds = frozenset({"cpu"})

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._number = 0

    def stage(self, flat: Tensor) -> Tensor:
        log.append("stage")
        return flat.clone()

    def share(self, flat: Tensor) -> Block:
        log.append("share")
        self._number += 1
        path = Path(self._folder, f"{os.getpid()}-{self._number}")
        path.write_bytes(flat.numpy().tobytes())
        handle, counter = str(path).encode(), b"/torch_%d" % os.getpid()
        return Block("files", handle, flat.nbytes, 0, counter, self._number, b"", False)

    def find(self, gpu: str) -> tuple[int, int] | None:
        return (0, 1 << 40) if gpu == "files" else None

    def open(self, index: int, block: Block) -> Tensor:
        log.append("open")
        data = bytearray(Path(block.handle.decode()).read_bytes())
        self.give_up(block)
        return torch.frombuffer(data, dtype=torch.uint8)

    def copy(self, flat: Tensor, target: torch.device) -> Tensor:
        log.append("copy")
        return flat.clone()

    def give_up(self, block: Block) -> None:
        Path(block.handle.decode()).unlink()  # raises if it was counted down before


def install(folder: str) -> None:
    """From here on, floating-point tensors live on the device, which all workers see."""
    cuda_ipc.memory = Files(folder)
    reduce, decide, pack = TensorWriter.reduce, cuda_ipc.decide, payload.pack

    def pack_if_here(tensor: Tensor, large: list[Any]) -> Any:
        return None if tensor.is_floating_point() and tensor.nbytes > SMALL else pack(tensor, large)

    def reduce_as_elsewhere(self: TensorWriter, tensor: Tensor) -> Any:
        is_there = tensor.is_floating_point() and self._devices is not None
        return self._reduce_elsewhere(tensor) if is_there else reduce(self, tensor)

    def decide_as_for_cuda(device: Device, target: Device, nbytes: int, **more: Any) -> Any:
        there = Device("cuda", 0)
        return decide(there, there, nbytes, **{**more, "ours": ("/0",), "theirs": ("/0",)})

    payload.pack = pack_if_here
    TensorWriter.reduce = reduce_as_elsewhere  # type: ignore[method-assign]
    cuda_ipc.decide = decide_as_for_cuda


MAPS = {"w0": {"cpu": "cpu"}, "w1": {"cpu": "cpu"}}


def workers_with(folder: Path, **options: Any) -> Iterator[Workers]:
    with Workers(2) as workers:
        workers.run(install, str(folder))
        workers.run(functools.partial(rpc_workers.join, device_maps=MAPS, **options))
        yield workers
        workers.run(rpc_workers.leave)
    assert list(folder.iterdir()) == []


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Workers]:
    """At the end every block has been counted down, and none twice."""
    yield from workers_with(tmp_path)


def ones(size: int = LARGE) -> Tensor:
    return torch.ones(size)


def total(x: Tensor) -> float:
    return float(x.sum())


def doubled(x: Any) -> Any:
    return [2 * x, x]


def nap(seconds: float, *given: Any) -> Any:
    time.sleep(seconds)
    return given


def items(count: int) -> Iterator[Tensor]:
    for i in range(count):
        yield torch.full((LARGE,), float(i))


def what_was_done() -> list[str]:
    found = list(log)
    log.clear()
    return found


def gone(x: Any) -> Any:
    return x


def test_requests_replies_items_and_values_are_shared(two):
    def case():
        assert rpc.rpc_sync("w1", total, (ones(),)) == LARGE
        assert what_was_done() == ["share"]
        two_x, x = rpc.rpc_sync("w1", doubled, (ones(),))
        assert (total(two_x), total(x)) == (2 * LARGE, LARGE)
        assert what_was_done() == ["share", *["open", "copy"] * 2]
        assert rpc.rpc_async("w1", total, (ones(),)).wait() == LARGE
        assert total(rpc.remote("w1", ones).to_here()) == LARGE
        assert rpc.remote("w1", total, (ones(),)).to_here() == LARGE
        assert [total(each) for each in rpc.rpc_stream("w1", items, (40,))] == [
            i * LARGE for i in range(40)
        ]
        assert "stage" not in what_was_done()
        rpc.rpc_sync("w1", nap, (0, [ones(10)]))
        assert what_was_done() == ["stage"]  # small ones are not worth it

    two.on(0, case)
    assert two.on(1, what_was_done).count("stage") == 1


def test_what_is_sent_to_oneself_is_handed_over(two):
    def case():
        given = ones()
        found, _ = rpc.rpc_sync("w0", doubled, (given,))
        assert total(found) == 2 * LARGE
        assert set(what_was_done()) == {"copy"}
        [kept] = rpc.rpc_sync("w0", nap, (0, given))
        kept.zero_()
        assert total(given) == LARGE
        assert not cuda_ipc._handed

    two.on(0, case)


def test_calls_that_nobody_waits_for_hold_no_blocks(two, tmp_path):
    def case():
        rpc.rpc_sync("w1", total, (ones(),))
        # Given up before they start, while they run, and while their answers are on the way.
        calls = [rpc.rpc_async("w1", nap, (0.2, ones(), i)) for i in range(40)]
        for each in calls:
            each.cancel()
        for seconds in (0.001, 0.05):
            with pytest.raises(rpc.RpcTimeout):
                rpc.rpc_sync("w1", nap, (0.3, ones()), timeout=seconds)
        with rpc.rpc_stream("w1", items, (100,)) as stream:
            next(stream)

    two.on(0, case)
    # Until then, the generator may make one more.
    eventually(lambda: two.on(1, rpc.statistics)["calls"]["being_served"] == 0)
    eventually(lambda: not list(tmp_path.iterdir()))


def test_calls_that_cannot_be_read_hold_no_blocks(two, tmp_path):
    def case():
        rpc.rpc_sync("w1", forget_gone)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="Can't get attribute"):
                rpc.rpc_sync("w1", gone, (ones(),))
            with pytest.raises(RuntimeError, match="Can't get attribute"):
                rpc.remote("w1", gone, (ones(),)).to_here()
        with pytest.raises(rpc.MessageTooLarge):
            rpc.rpc_sync("w1", total, ([ones(), *torch.zeros(20_000, 2).int().unbind(0)],))

    two.on(0, case)
    eventually(lambda: not list(tmp_path.iterdir()))


def forget_gone() -> None:
    globals().pop("gone", None)


@pytest.mark.parametrize("options", [{"transports": ("tcp",)}, {"cuda_ipc": False}], ids=str)
def test_where_it_is_not_possible_or_not_wanted_tensors_are_staged(tmp_path, options):
    for two in workers_with(tmp_path, **options):

        def case():
            assert [total(each) for each in rpc.rpc_sync("w1", doubled, (ones(),))] == [
                2 * LARGE,
                LARGE,
            ]
            assert set(what_was_done()) == {"stage"}

        two.on(0, case)
