"""PostLocalSGDOptimizer in a Join: models are averaged over the ranks that have inputs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)

from rallypoint.errors import ConfigError
from rallypoint.join.members import Member
from rallypoint.join.run import Run


if TYPE_CHECKING:
    from torch.distributed.optim import PostLocalSGDOptimizer


def is_local_sgd(joined: object) -> bool:
    """Whether an object is a PostLocalSGDOptimizer."""
    # Importing torch's distributed optimizers emits a deprecation warning. A program that has such an optimizer has
    # already imported them.
    optim = sys.modules.get("torch.distributed.optim")
    return optim is not None and isinstance(joined, optim.PostLocalSGDOptimizer)


class LocalSgdMember(Member):
    """Post-local SGD (arXiv:1808.07217) that does not average in the models of ranks that have run out.

    The averager takes the mean over all ranks of a group. So each model is first multiplied by the group's size
    divided by the number of its ranks with inputs, and by 0 on ranks without inputs.

    Args:
        optimizer: an optimizer with torch's periodic or hierarchical averager.

    Raises:
        ConfigError: it has another averager, whose schedule and groups are unknown.
    """

    needs_plan = True

    def __init__(self, optimizer: PostLocalSGDOptimizer) -> None:
        self._optimizer: Any = optimizer
        self._averager: Any = optimizer.averager
        self.name = "PostLocalSGDOptimizer"
        self.group = self._averager.process_group
        if not isinstance(self._averager, PeriodicModelAverager | HierarchicalModelAverager):
            raise ConfigError(
                "joinables",
                type(self._averager).__name__,
                "expected a PeriodicModelAverager or a HierarchicalModelAverager in PostLocalSGDOptimizer",
            )
        self._run: Run | None = None

    def enter(self, run: Run, stack: ExitStack, kwargs: dict[str, Any]) -> None:
        self._run = run

    def planned(self, run: Run, stack: ExitStack) -> None:
        average = self._averager.average_parameters

        def weighted(params: Iterable[Any]) -> None:
            params = list(params)
            if not run.counted:
                run.step += 1
                run.own += 1
            group = self._group_now()
            if group is not None:
                self._weigh(params, self._weight(run, group))
            average(params)

        self._averager.__dict__["average_parameters"] = weighted
        stack.callback(self._averager.__dict__.pop, "average_parameters", None)

    def _group_now(self) -> dist.ProcessGroup | None:
        """The group that this step's call averages over. None: the call only counts."""
        averager = self._averager
        since = averager.step - averager.warmup_steps
        if since < 0:
            return None
        if isinstance(averager, PeriodicModelAverager):
            group: dist.ProcessGroup | None = averager.process_group
            return group if since % averager.period == 0 else None
        for period, group in reversed(averager.period_process_group_dict.items()):
            if averager.step % period == 0:
                return group
        return None

    def _weight(self, run: Run, group: dist.ProcessGroup) -> float:
        schedule = run.schedule
        assert schedule is not None
        world = dist.group.WORLD if run.group is None else run.group
        assert world is not None
        ranks = [dist.get_group_rank(world, each) for each in dist.get_process_group_ranks(group)]
        active = sum(schedule.is_active(rank, run.step - run.base) for rank in ranks)
        if not active:
            return 1.0  # no rank of the group has inputs: their models stay as they are
        return len(ranks) / active if run.active else 0.0

    def _weigh(self, params: list[Any], weight: float) -> None:
        with torch.no_grad():
            for each in params:
                for parameter in each["params"] if isinstance(each, dict) else [each]:
                    if parameter.grad is None:
                        continue  # torch's averagers skip it
                    if weight:
                        parameter.mul_(weight)
                    else:
                        parameter.zero_()

    def main_hook(self) -> None:
        assert self._run is not None
        if not self._run.syncs:
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                # If DDP has the parameter and left it no gradient, no rank has used it.
                ddp_has_it = id(parameter) in self._run.averaged
                if parameter.grad is None and parameter.requires_grad and not ddp_has_it:
                    # torch's averagers skip parameters without a gradient, and the other ranks average these.
                    parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
