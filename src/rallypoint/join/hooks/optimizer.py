"""Optimizers and schedulers of learning rates in a Join: a rank that has run out steps with the others."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rallypoint.join.members import Member
from rallypoint.join.run import Run


class StepMember(Member):
    """Whatever has a ``step()`` that the loop calls whenever gradients were exchanged.

    Placed after the DDP whose gradients it uses. Without it a rank that has run out misses updates of the
    optimizer's state (momenta), and its model drifts away from the others' in the next epoch.

    Args:
        stepped: an optimizer or a scheduler.
    """

    def __init__(self, stepped: Optimizer | LRScheduler) -> None:
        self._stepped: Any = stepped
        self.name = type(stepped).__name__
        self._run: Run | None = None
        if isinstance(self._stepped, Joinable):  # a ZeroRedundancyOptimizer
            self.group = self._stepped.join_process_group
            self.device = self._stepped.join_device

    def enter(self, run: Run, stack: ExitStack, kwargs: dict[str, Any]) -> None:
        self._run = run

    def main_hook(self) -> None:
        run = self._run
        assert run is not None
        if run.exchanged if run.schedule is None else run.syncs:
            self._stepped.step()
