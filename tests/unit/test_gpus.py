"""How much workers use GPUs: through the driver's library, with and without a driver."""

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from pace import pace
from rallypoint.control import usage
from rallypoint.control.gpus import Gpus


class Driver:
    """Replaces the driver on a host with GPUs; raises the errors of NVIDIA's library."""

    def __init__(self, gpus: list[dict[str, Any]]) -> None:
        self._gpus = gpus
        self.opened = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (
            "nvmlInit",
            "nvmlDeviceGetCount",
            "nvmlDeviceGetHandleByIndex",
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetUtilizationRates",
        ):
            assert hasattr(pynvml, name)
            monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlInit(self) -> None:  # noqa: N802  # NVIDIA's name, as below
        self.opened += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        return self._gpus[index]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: dict[str, Any]) -> list[Any]:  # noqa: N802
        if "processes" not in gpu:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=memory)
            for pid, memory in gpu["processes"].items()
        ]

    def nvmlDeviceGetUtilizationRates(self, gpu: dict[str, Any]) -> Any:  # noqa: N802
        if "busy" not in gpu:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=gpu["busy"])


def test_a_driver_that_does_not_answer_holds_up_nobody_who_must_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver([{"processes": {10: 100}, "busy": 30}])
    driver.install(monkeypatch)
    gpus, asked = Gpus(), {0: frozenset({10})}
    found = {0: {"gpu": 30.0, "gpu_memory": 100}}
    assert gpus.used_soon(asked, 60.0) == found
    answers, calls = threading.Event(), []

    def used(workers: Mapping[int, frozenset[int]]) -> dict[int, dict[str, Any]]:
        calls.append(workers)
        answers.wait(60)
        return {0: {"gpu": 1.0, "gpu_memory": 2}}

    monkeypatch.setattr(gpus, "used", used)
    began = time.monotonic()
    for _ in range(50):
        assert gpus.used_soon(asked, 0.01) == found
    assert time.monotonic() - began < 10 * pace()
    assert len(calls) == 1  # one thread waits, not one per question
    assert gpus.used_soon({1: frozenset({3})}, 0.01) == {}
    reading = gpus._reading
    answers.set()
    assert reading is not None and reading.done.wait(60)
    assert gpus.used_soon(asked, 60.0) == {0: {"gpu": 1.0, "gpu_memory": 2}}
    assert len(calls) == 2


def test_each_worker_has_its_processes_and_its_busiest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(
        [
            {"processes": {10: 100, 11: 5, 99: 7}, "busy": 30},
            {"processes": {10: 20, 20: None}, "busy": 90},
            {},  # fell off the bus
            {"processes": {30: 1}},  # partitioned
        ]
    )
    driver.install(monkeypatch)
    gpus = Gpus()
    workers = {
        0: frozenset({10, 11, 12}),
        1: frozenset({20}),
        2: frozenset({30}),
        3: frozenset({40}),
    }
    for _ in range(2):
        assert gpus.used(workers) == {
            0: {"gpu": 90.0, "gpu_memory": 125},
            1: {"gpu": 90.0, "gpu_memory": None},
            2: {"gpu": None, "gpu_memory": 1},
        }
    assert driver.opened == 1


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert Gpus().used({0: frozenset({1})}) == {}


def test_without_the_package_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().used({0: frozenset({1})}) == {}
    told = usage.of_workers([1])[1]
    assert told["gpu"] is told["gpu_memory"] is None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_the_driver_knows_the_memory_of_a_process() -> None:
    code = (
        "import torch; held = torch.zeros(64 << 20, dtype=torch.uint8, device='cuda:0');"
        " torch.cuda.synchronize(); print(flush=True); input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        gpus = Gpus()
        found = gpus.used({0: frozenset({child.pid})})
        any_pid = gpus.used({0: frozenset(range(1 << 22))})
        child.stdin.close()
    if any_pid and not found:
        pytest.skip("the driver names processes by their ids on the host")
    assert found[0]["gpu_memory"] >= 64 << 20
    assert 0 <= found[0]["gpu"] <= 100
