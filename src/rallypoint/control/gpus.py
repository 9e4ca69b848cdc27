"""The processes' use of NVIDIA GPUs, as the driver reports it (NVML, through the package nvidia-ml-py).

The driver identifies processes by their pids on the host. In a container with its own pids, nothing may be found.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from rallypoint._core import side_thread


class _Reading:
    """The result of a reading thread."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.found: dict[int, dict[str, Any]] = {}


class Gpus:
    """The GPUs of this host. Opened on first use; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        # Set under the lock when opened. Empty: no package, no driver or no GPU.
        self._handles: list[Any] = []
        self._library: Any = None
        # Only for the one thread that must not wait.
        self._reading: _Reading | None = None
        self._last: dict[int, dict[str, Any]] = {}

    def used(self, workers: Mapping[int, frozenset[int]]) -> dict[int, dict[str, Any]]:
        """What workers use.

        Args:
            workers: by the caller's key, the pids of a worker and its children.
        Returns:
            By the same key, for those that use a GPU: ``gpu`` (percent of the time in which the busiest of its GPUs ran any
            process's kernel) and ``gpu_memory`` (bytes of its processes). Each is None if the driver does not say.
        """
        self._open()
        busy: dict[int, list[float]] = {}
        memory: dict[int, list[int]] = {}
        for handle in self._handles:
            running = self._running(handle)
            of_gpu = self._busy(handle) if running else []
            for key, pids in workers.items():
                own = [used for pid, used in running if pid in pids]
                if own:
                    busy.setdefault(key, []).extend(of_gpu)
                    memory.setdefault(key, []).extend(used for used in own if used is not None)
        return {
            key: {"gpu": max(busy[key], default=None), "gpu_memory": sum(each) if each else None}
            for key, each in memory.items()
        }

    def used_soon(
        self, workers: Mapping[int, frozenset[int]], patience: float
    ) -> dict[int, dict[str, Any]]:
        """Like :meth:`used`, for a thread that must not wait: the driver may take minutes when a GPU has failed.

        Args:
            workers: as in :meth:`used`.
            patience: how many seconds it may take. After that, and until the driver answers, returns the last known values.
        """
        if self._is_open and self._reading is None and not self._handles:
            return {}
        if self._reading is None or self._taken():
            reading = _Reading()

            def read() -> None:
                try:
                    reading.found = self.used(workers)
                finally:
                    reading.done.set()

            if side_thread.begin(read, "rally-gpus"):
                self._reading = reading
                reading.done.wait(patience)
                self._taken()
        return {key: self._last[key] for key in workers if key in self._last}

    def _taken(self) -> bool:
        """Whether the reading is complete. If so, keep its result as the last one."""
        if self._reading is None or not self._reading.done.is_set():
            return False
        self._last, self._reading = self._reading.found, None
        return True

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
                pass  # no driver, or its version differs from its library's

    def _running(self, handle: Any) -> list[tuple[int, int | None]]:
        """The pids that use a GPU, and how many bytes of its memory each uses."""
        try:
            running = self._library.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._library.NVMLError:
            return []
        return [(each.pid, each.usedGpuMemory) for each in running]

    def _busy(self, handle: Any) -> list[float]:
        """The utilization in percent of the time; empty if the driver does not say, as for a partitioned GPU (MIG)."""
        try:
            return [float(self._library.nvmlDeviceGetUtilizationRates(handle).gpu)]
        except self._library.NVMLError:
            return []


GPUS = Gpus()
