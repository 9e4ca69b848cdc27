"""Optimizers around another optimizer: those of frameworks, which only forward, and those with a state of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rallypoint.elastic import torch_private


def unwrapped(given: Any) -> Any:
    """The optimizer in a framework's wrapper (accelerate, Fabric), which forwards calls but not what is assigned to it.

    A wrapper that keeps something itself, such as the slow weights of a Lookahead, is returned as it is.
    """
    while isinstance(given, torch.optim.Optimizer):
        within = getattr(given, "optimizer", None)
        if not isinstance(within, torch.optim.Optimizer) or within is given:
            break
        if not _is_all_within(given, within):
            break
        given = within
    return given


def _is_all_within(given: torch.optim.Optimizer, within: torch.optim.Optimizer) -> bool:
    """Whether a wrapper has no state besides that of the optimizer in it."""
    if given.state is not within.state or given.param_groups is not within.param_groups:
        return False
    if torch_private.local_optimizer(within) is not within:  # it gathers its state from all ranks
        return True
    return set(given.state_dict()) <= set(within.state_dict())


def note_steps(given: torch.optim.Optimizer, note: Callable[[torch.optim.Optimizer], None]) -> Any:
    """Have a function called with an optimizer after each of its steps. Returns the handle that ends this.

    A wrapper's class often lacks hooks, as it does not call torch's ``__init__``. The optimizer in it has them.
    """
    hooked = given
    while not torch_private.calls_hooks(hooked) and (within := _within(hooked)) is not None:
        hooked = within
    return hooked.register_step_post_hook(lambda *_: note(given))


def _within(given: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer in a wrapper, whatever the attribute is called; None if there is none."""
    found = (getattr(given, "optimizer", None), *vars(given).values())
    return next(
        (each for each in found if isinstance(each, torch.optim.Optimizer) and each is not given),
        None,
    )
