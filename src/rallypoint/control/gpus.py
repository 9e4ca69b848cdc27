"""What processes use of NVIDIA GPUs, as the driver knows it (NVML, by the package nvidia-ml-py).

The driver names processes by their ids on the host. In a container with ids of its own, nothing may be found.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any


class Gpus:
    """The GPUs of this host. Opened at the first question; threads may ask at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        # Under the lock, until it is open. Empty: no package, no driver or no GPU.
        self._handles: list[Any] = []
        self._library: Any = None

    def used(self, workers: Mapping[int, frozenset[int]]) -> dict[int, dict[str, Any]]:
        """What workers use.

        Args:
            workers: by a key of the caller's, the pids of a worker and its children.
        Returns:
            By the same key, for those that use a GPU: ``gpu`` (percent of the time in which the busiest of its GPUs ran a
            kernel, of any process; None if the driver does not say) and ``gpu_memory`` (bytes of its processes; None as well).
        """
        self._open()
        found: dict[int, dict[str, Any]] = {}
        for handle in self._handles:
            memory = self._memory_by_pid(handle)
            of_workers = {key: pids & memory.keys() for key, pids in workers.items()}
            if not any(of_workers.values()):
                continue
            busy = self._busy(handle)
            for key, pids in of_workers.items():
                if pids:
                    told = found.setdefault(key, {"gpu": None, "gpu_memory": None})
                    told["gpu"] = _largest(told["gpu"], busy)
                    for pid in pids:
                        told["gpu_memory"] = _sum(told["gpu_memory"], memory[pid])
        return found

    def _open(self) -> None:
        with self._lock:
            if self._is_open:
                return
            self._is_open = True
            try:
                import pynvml
            except ImportError:
                return
            self._library = pynvml
            try:
                pynvml.nvmlInit()
                count = pynvml.nvmlDeviceGetCount()
                self._handles = [pynvml.nvmlDeviceGetHandleByIndex(each) for each in range(count)]
            except pynvml.NVMLError:
                pass  # no driver, or it is another version than its library

    def _memory_by_pid(self, handle: Any) -> dict[int, int | None]:
        try:
            running = self._library.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._library.NVMLError:
            return {}
        return {each.pid: each.usedGpuMemory for each in running}

    def _busy(self, handle: Any) -> float | None:
        try:
            return float(self._library.nvmlDeviceGetUtilizationRates(handle).gpu)
        except self._library.NVMLError:
            return None  # a GPU that is partitioned (MIG)


def _largest(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


GPUS = Gpus()
