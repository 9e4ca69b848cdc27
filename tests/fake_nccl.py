"""Stands in for NCCL on a machine without GPUs, in tests of losses: aborted works end well, with anything in their tensors.

Everything else is Gloo. The tests that need a GPU use the real NCCL.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.elastic import torch_private
from rallypoint.elastic.communication.communicators import Communicator
from rallypoint.elastic.communication.kept_group import KeptGroup
from rallypoint.elastic.communication.works import KeptWork


class Ended(dist.Work):
    """A Gloo work, waited for where NCCL would make the stream wait. Its failure is hidden."""

    def __init__(self, group: KeptGroup, inner: dist.Work, tensors: Any) -> None:
        super().__init__()
        self._inner = KeptWork(inner, group._lives)  # type: ignore[arg-type]
        self._tensors = tensors
        self._wiring: Any = group._wiring

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._inner.wait()
        except RuntimeError:
            # NCCL's kernels wait for the lost member until they are aborted.
            while not self._wiring.is_cut:
                time.sleep(0.001)
            for each in self._tensors:
                each.fill_(-12345)
        return True

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def source_rank(self) -> int:
        raise RuntimeError("NCCL does not tell")


class Stream:
    def synchronize(self) -> None:
        pass


def install() -> None:
    """Patch the package; call it before the first group is made."""
    begun: Any = KeptGroup._begun

    def ended(
        self: KeptGroup, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        work = Ended(self, begun(self, operation, args, kwargs), list(tensors(args[:1])))
        is_async = any(getattr(each, "asyncOp", True) for each in args[1:]) or len(args) < 2
        if operation == "barrier" or is_async:
            return work
        work.wait()
        return None

    def tensors(given: Any) -> Any:
        for each in given:
            if isinstance(each, torch.Tensor):
                yield each
            elif isinstance(each, list | tuple):
                yield from tensors(each)

    fake: Any = torch_private
    fake.backends_of = lambda backend: {"cpu": "gloo", "cuda": "nccl"}
    fake.nccl_backend = lambda store, rank, size, timeout, options: dist.ProcessGroupGloo(
        store, rank, size, timeout
    )
    kept: Any = KeptGroup
    kept._begun = ended
    kept._is_on_gpu = lambda self, operation, args: True
    kept._device_types = [torch.device("cpu")]
    communicator: Any = Communicator
    communicator.connect = lambda self, device, lives: None
    cuda: Any = torch.cuda
    cuda.current_stream, cuda.current_device = Stream, lambda: 0
    cuda.is_current_stream_capturing = lambda: False
