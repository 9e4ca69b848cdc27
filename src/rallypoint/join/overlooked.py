"""Finds optimizers and scalers that step in the block but are not listed: they fall behind on ranks that run out."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import torch_private


_log = logging.getLogger(__name__)

# How far up the call stack from an optimizer's hook to look for its scaler, because wrappers lie in between.
DEPTH = 8

_told: WeakSet[Any] = WeakSet()


class Overlooked:
    """Watches optimizers while the block runs.

    Args:
        stack: stops watching when it ends.
        listed: the optimizers and scalers in Join's list.
    """

    def __init__(self, stack: ExitStack, listed: Collection[Any]) -> None:
        self._scaled = any(isinstance(each, GradScaler) for each in listed)
        optimizers = [each for each in listed if isinstance(each, Optimizer)]
        self._seen = {id(each) for each in optimizers} if self._scaled else set()
        self._covered = {
            id(p) for each in optimizers for group in each.param_groups for p in group["params"]
        }
        self._optimizers: list[Optimizer] = []
        self._scaler: GradScaler | None = None
        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)

    def _before_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        self._optimizers.append(optimizer)
        if not self._scaled:
            self._scaler = self._scaler or _calling_scaler()

    def warn(self, averaged: Collection[int]) -> None:
        """Warn about each optimizer and scaler whose updates some ranks have missed.

        Args:
            averaged: ``id`` of each parameter whose gradients are averaged over the ranks.
        """
        forgotten: list[Any] = [each for each in self._optimizers if self._lags(each, averaged)]
        if self._scaler is not None:
            forgotten.append(self._scaler)
        for each in forgotten:
            if each in _told:
                continue
            _told.add(each)
            name = type(each).__name__
            _log.warning(
                "%s is not listed in Join, so ranks that run out of inputs early miss its updates, and the ranks' models"
                " drift apart in the next epoch; list it, as in Join([model, optimizer%s])",
                name,
                ", scaler" if isinstance(each, GradScaler) else "",
            )

    def _lags(self, optimizer: Optimizer, averaged: Collection[int]) -> bool:
        """Whether an optimizer keeps state for averaged parameters that no listed optimizer covers."""
        return any(
            isinstance(value, torch.Tensor)
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in averaged and id(p) not in self._covered
            for value in optimizer.state.get(p, {}).values()
        )


def _calling_scaler() -> GradScaler | None:
    """The scaler whose ``step`` called the optimizer's. Neither has a reference to the other."""
    frame = torch_private.caller(2)
    for _ in range(DEPTH):
        scaler = frame.f_locals.get("self")
        if isinstance(scaler, GradScaler):
            return scaler
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
