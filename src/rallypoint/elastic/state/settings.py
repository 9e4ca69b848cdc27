"""What a step may change before it communicates, besides tensors of modules: learning rates, schedulers' counts.

A rank that repeats a step must begin it as it did the first time. Large state is not copied in each step: if an object
with much state changes early in a step, a repeated step changes it twice.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch

from .digests import digest
from .plain_data import plain


# An object with more numbers than this, or tensors of more bytes, is left out.
MAX_NUMBERS, MAX_BYTES = 1000, 1 << 16

_OF_PARAMETERS = {"params", "param_names"}

_log = logging.getLogger(__name__)


class _TooLarge(Exception):
    """The state is too large to be worth a copy in each step."""


class Settings:
    """The current settings of a session's objects, and those to go back to.

    Args:
        optimizers: their groups have learning rates and the like.
        others: objects with a state of their own.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], others: Sequence[Any]) -> None:
        self._optimizers = list(optimizers)
        # A scaler changes only after the optimizer's step, and asking for its state waits for the GPU.
        self._others = [
            each
            for each in others
            if not isinstance(each, torch.optim.Optimizer | torch.amp.GradScaler)
        ]

    def copied(self) -> list[Any]:
        """A copy, for :meth:`restore`."""
        groups = [[_small(group) for group in each.param_groups] for each in self._optimizers]
        rest = []
        for each in tuple(self._others):
            try:
                rest.append(_copied(each.state_dict(), _Room()))
            except Exception as error:  # noqa: BLE001  its class may be the user's, and what it holds, too
                self._others.remove(each)
                why = str(error) or "it is too large"
                _log.info("a %s is not copied in each step: %s", type(each).__name__, why)
        return [groups, rest]

    def digests(self) -> list[tuple[str, str]]:
        """For each of the other objects with little state: its class, and a digest of its state."""
        rest = self.copied()[1]
        return [
            (type(each).__name__, digest(state))
            for each, state in zip(self._others, rest, strict=True)
        ]

    @torch.no_grad()
    def restore(self, saved: Sequence[Any]) -> None:
        """Go back to a copy, which stays as it is."""
        groups, rest = saved
        for optimizer, held in zip(self._optimizers, groups, strict=True):
            del optimizer.param_groups[len(held) :]  # the step adds them again
            for group, before in zip(optimizer.param_groups, held, strict=True):
                for name, value in before.items():
                    if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                        group[name].copy_(value)  # others may hold it, such as a compiled optimizer
                    else:
                        group[name] = copy.deepcopy(value)
        for each, state in zip(self._others, rest, strict=True):
            each.load_state_dict(copy.deepcopy(state))  # CyclicLR takes parts out of it


class _Room:
    """How much more of one object may be copied."""

    def __init__(self) -> None:
        self.numbers, self.bytes = MAX_NUMBERS, MAX_BYTES

    def take(self, numbers: int, size: int = 0) -> None:
        self.numbers -= numbers
        self.bytes -= size
        if self.numbers < 0 or self.bytes < 0:
            raise _TooLarge


def _small(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group without parameters, their names, and whatever else is large."""
    found = {}
    for name, value in group.items():
        if name not in _OF_PARAMETERS:
            with contextlib.suppress(_TooLarge):
                found[name] = _copied(value, _Room())
    return found


def _copied(state: Any, room: _Room) -> Any:
    """Like :func:`copy.deepcopy`, but faster for what states are made of, and refuses what is large."""
    room.take(1)
    state = plain(state)
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, torch.Tensor):
        room.take(0, state.numel() * state.element_size())
        return state.detach().clone()
    if type(state) is dict:
        return {key: _copied(value, room) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_copied(each, room) for each in state)
    return copy.deepcopy(state)
