"""Optimizers, learning-rate schedulers and gradient scalers in a Join: they step on ranks that have run out, too."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rallypoint.join import exchange, torch_private
from rallypoint.join.members import Member
from rallypoint.join.run import Run
from rallypoint.join.state import Part, digest, share


class StepMember(Member):
    """An optimizer or scheduler whose ``step()`` the loop calls after each exchange of gradients.

    A rank that has run out steps as well, so that sharded state and state that depends on the number of steps stay up to
    date. It steps with the reduced gradients. If the other ranks clip them, or skip a step, its state differs at the
    end, and it takes theirs. A ZeroRedundancyOptimizer cannot wait until then, since each rank updates its shard for
    all ranks: it compares gradients before each step, and sends them if they differ.

    Args:
        stepped: the optimizer or scheduler.
    """

    def __init__(self, stepped: Optimizer | LRScheduler) -> None:
        self.stepped: Any = stepped
        self.name = type(stepped).__name__
        self._run: Run | None = None
        self._sharded = isinstance(self.stepped, Joinable)  # a ZeroRedundancyOptimizer
        if self._sharded:
            zero: Any = stepped
            self.group, self.device = zero.join_process_group, zero.join_device
        # A closure or a metric, which a rank that has run out does not have.
        _, *arguments = inspect.signature(type(self.stepped).step).parameters.values()
        self._needs_arguments = any(
            each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            for each in arguments
        )

    def enter(self, run: Run, stack: ExitStack, kwargs: dict[str, Any]) -> None:
        self._run = run
        if self._sharded:
            stack.callback(self.stepped.register_step_pre_hook(self._before_sharded_step).remove)

    def main_hook(self) -> None:
        run, stepped = self._run, self.stepped
        assert run is not None
        if not (run.exchanged if run.schedule is None else run.syncs) or self._needs_arguments:
            return
        scaler = run.scaler
        if scaler is None or not isinstance(stepped, Optimizer):
            stepped.step()
        elif any(p.grad is not None for p in _parameters(stepped)):
            if not torch_private.has_scale(scaler):
                scaler.scale(
                    torch.zeros(1, device=run.device)
                )  # its state is made with the first loss
            scaler.step(stepped)
            run.scaled = True

    # -- sharded --------------------------------------------------------------------------------

    def _before_sharded_step(self, zero: Any, _: Any, __: Any) -> None:
        """Send the gradients that the other ranks are about to use to shard owners that have run out."""
        run = self._run
        assert run is not None
        if not run.someone_is_out:
            return
        parameters = _parameters(zero)
        own = [int(not run.is_out), digest([p.grad for p in parameters])]
        told = exchange.gather(own, 2, run.device, run.group)
        out = [rank for rank, (active, _) in enumerate(told) if not active]
        last = max((rank for rank, (active, _) in enumerate(told) if active), default=None)
        if last is None or all(told[rank] == [0, told[last][1]] for rank in out):
            return
        owner = torch_private.shard_owners(zero)
        theirs = [p for p in parameters if owner[p] in out]
        found = share([p.grad for p in theirs], last, run.device, run.group, "gradients")
        for parameter, gradient in zip(theirs, found, strict=True):
            if run.is_out:
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    # -- all ranks have finished ------------------------------------------------------------------

    def parts(self) -> Sequence[Part]:
        assert self._run is not None
        if not isinstance(self.stepped, Optimizer):
            return [Part(self.name, self._scheduler, self._take_scheduler)]
        if self._sharded:
            return [Part(self.name, lambda: _options(self.stepped), self._take_options)]
        if any(id(p) in self._run.averaged for p in _parameters(self.stepped)):
            return [Part(self.name, self._optimizer, self._take_optimizer)]
        return []  # these parameters need not be equal on all ranks

    def _shared(self, values: Any, source: int) -> Any:
        run = self._run
        assert run is not None
        return share(values, source, run.device, run.group, self.name)

    def _scheduler(self) -> Any:
        optimizer = getattr(self.stepped, "optimizer", None)
        return [self.stepped.state_dict(), [] if optimizer is None else _options(optimizer)]

    def _take_scheduler(self, source: int, keep: bool) -> None:
        state, options = self._shared(self._scheduler(), source)
        if not keep:
            self.stepped.load_state_dict(state)
            if options:
                _set_options(self.stepped.optimizer, options)

    def _take_options(self, source: int, keep: bool) -> None:
        options = self._shared(_options(self.stepped), source)
        if not keep:
            _set_options(self.stepped, options)

    def _optimizer(self) -> Any:
        """The state by position instead of by parameter, so that it is equal on all ranks."""
        state = self.stepped.state
        return [
            [dict(state[p]) if p in state else None for p in self._averaged()],
            _options(self.stepped),
        ]

    def _take_optimizer(self, source: int, keep: bool) -> None:
        states, options = self._shared(self._optimizer(), source)
        if keep:
            return
        _set_options(self.stepped, options)
        state = self.stepped.state
        for parameter, told in zip(self._averaged(), states, strict=True):
            before = state.pop(parameter, {})
            if told is not None:
                state[parameter] = {
                    name: _put(before.get(name), value, parameter.device)
                    for name, value in told.items()
                }

    def _averaged(self) -> list[torch.Tensor]:
        assert self._run is not None
        return [p for p in _parameters(self.stepped) if id(p) in self._run.averaged]


class ScalerMember(Member):
    """A GradScaler that optimizers in the same Join step through.

    Args:
        scaler: updated after the optimizers have stepped.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler: Any = scaler
        self.name = type(scaler).__name__
        self._run: Run | None = None

    def enter(self, run: Run, stack: ExitStack, kwargs: dict[str, Any]) -> None:
        self._run = run
        if self.scaler.is_enabled():
            run.scaler = self.scaler

    def main_hook(self) -> None:
        run = self._run
        assert run is not None
        if run.scaled:
            self.scaler.update()
            run.scaled = False

    def parts(self) -> Sequence[Part]:
        return [Part(self.name, self.scaler.state_dict, self._take)]

    def _take(self, source: int, keep: bool) -> None:
        run = self._run
        assert run is not None
        state = share(self.scaler.state_dict(), source, run.device, run.group, self.name)
        if not keep:
            self.scaler.load_state_dict(state)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group: learning rates and the like."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _set_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    for group, told in zip(optimizer.param_groups, options, strict=True):
        for name, value in told.items():
            group[name] = _put(group.get(name), value, None)


def _put(before: Any, value: Any, device: torch.device | None) -> Any:
    """The value, copied into the existing tensor if it fits, because other code may hold a reference to that tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    if (
        isinstance(before, torch.Tensor)
        and before.shape == value.shape
        and before.dtype == value.dtype
    ):
        with torch.no_grad():
            return before.copy_(value)
    return value if device is None or value.device.type == "cpu" else value.to(device)
