"""Modules whose collectives only the modules themselves can match: the loop's body runs again, without side effects."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel  # torch.optim imports it

from rallypoint.join.members import Member
from rallypoint.join.run import Run
from rallypoint.join.schedule import Schedule
from rallypoint.join.weights import has_fsdp

from .sync_batch_norm import exchanges_statistics, silence


class ModuleMember(Member):
    """A module that is not a Joinable: sharded by ``fully_shard``, tensor-parallel, or with collectives of its own.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.name = type(module).__name__
        first = next(module.parameters(), None)
        self.device = None if first is None else first.device
        self._run: Run | None = None
        self._begun = -1

    def enter(self, run: Run, stack: ExitStack, kwargs: dict[str, Any]) -> None:
        assert self.module is not None
        self._run, self._begun = run, -1
        stack.callback(self.module.register_forward_pre_hook(self._begin).remove)

    def _begin(self, _: nn.Module, __: Any) -> None:
        if torch.is_grad_enabled() and self._run is not None:
            self._begun = self._run.step

    def begun_in(self, step: int) -> bool:
        return self._begun == step

    def unmatched(self, schedule: Schedule | None) -> str:
        assert self.module is not None
        if has_fsdp(self.module):
            return "its parameters are sharded, and its forward and backward passes gather them"
        return "only its own forward and backward passes can match its collectives"


class Standstill:
    """Preserves the modules' buffers and the random state of a rank that has run out.

    Replayed steps may change them; :meth:`end` restores them. The statistics of a SyncBatchNorm are shared by all
    ranks and keep changing; this rank adds nothing to them.

    Args:
        modules: the modules whose buffers to preserve.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._stack = ExitStack()
        parts = {id(part): part for module in modules for part in module.modules()}.values()
        for part in parts:
            if isinstance(part, AveragedModel):
                continue  # it counts the updates of its parameters, which are not undone
            if exchanges_statistics(part):
                silence(part, self._stack)
            else:
                self._keep_buffers(part)
        for put_back in _random_states():
            self._stack.callback(put_back)

    def _keep_buffers(self, part: nn.Module) -> None:
        for name, buffer in part.named_buffers(recurse=False):
            self._stack.callback(_put_back, part, name, buffer, buffer.detach().clone())

    def end(self) -> None:
        """Restore everything. A second call does nothing."""
        self._stack.close()


def _put_back(part: nn.Module, name: str, buffer: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(value)
    setattr(part, name, buffer)  # the module may have replaced the tensor


def _random_states() -> list[Callable[[], Any]]:
    """Functions that restore each random state a training loop may use."""
    cpu, python = torch.get_rng_state(), random.getstate()
    found: list[Callable[[], Any]] = [
        lambda: torch.set_rng_state(cpu),
        lambda: random.setstate(python),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state()
        found.append(lambda: torch.cuda.set_rng_state(cuda))
    if (numpy := sys.modules.get("numpy")) is not None:
        # Any: NumPy is not a dependency.
        legacy: Any = numpy.random
        state = legacy.get_state()
        found.append(lambda: legacy.set_state(state))
    return found
