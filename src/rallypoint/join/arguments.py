"""The arguments of ``Join``, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from rallypoint._core import near_words
from rallypoint._core.whole_numbers import is_whole
from rallypoint.errors import ConfigError

from .members import Member
from .schedule import WEIGHTINGS, Weighting


def check_types(
    lookahead: object,
    accumulation: object,
    enable: object,
    throw_on_early_termination: object,
    replay: object,
    samples: object,
) -> None:
    for name, value in (("lookahead", lookahead), ("accumulation", accumulation)):
        if value is None and name == "lookahead":
            continue
        if not is_whole(value) or value < 1:  # type: ignore[operator]  # it is a number
            raise ConfigError(name, value, "expected a number of steps, 1 or more")
    if not isinstance(enable, bool | int):
        # A likely mistake: Join(model, optimizer), without the list.
        hint = "as in Join([model, optimizer])" if isinstance(enable, nn.Module | Optimizer) else ""
        raise ConfigError("enable", type(enable).__name__, "expected True or False", hint)
    for name, value in (
        ("throw_on_early_termination", throw_on_early_termination),
        ("replay", replay),
    ):
        if not isinstance(value, bool | int) and (value is not None or name != "replay"):
            raise ConfigError(name, value, "expected True or False")
    if not callable(samples):
        raise ConfigError(
            "samples", samples, "expected a function that returns the number of samples in a batch"
        )


# The keyword of torch's own hooks, and all names that a typo may have been meant for.
TORCH_KWARG = "divide_by_initial_world_size"
ARGUMENTS = (
    *(TORCH_KWARG, "enable", "throw_on_early_termination", "steps", "lookahead", "weighting"),
    *("accumulation", "samples", "example", "replay", "process_group"),
)


def check_kwargs(kwargs: dict[str, Any], *, own_hooks: bool) -> None:
    """Refuse unknown keyword arguments, unless a Joinable of the user's own has a hook that may take them."""
    for name, value in kwargs.items():
        near = near_words.nearest(name, ARGUMENTS, cutoff=0.8)
        if name != TORCH_KWARG and (near or not own_hooks):
            hint = f"did you mean {near}?" if near else f"Join takes {', '.join(ARGUMENTS)}"
            raise ConfigError(
                name, value, "Join has no such argument, and no joinable of your own takes it", hint
            )


def weighting_of(weighting: Weighting | None, kwargs: dict[str, Any]) -> Weighting:
    if weighting is None:
        return "initial" if kwargs.get("divide_by_initial_world_size", True) else "ranks"
    if weighting not in WEIGHTINGS:
        raise ConfigError(
            "weighting", weighting, f"expected one of {', '.join(map(repr, WEIGHTINGS))}"
        )
    if "divide_by_initial_world_size" in kwargs:
        wanted = "initial" if kwargs["divide_by_initial_world_size"] else "ranks"
        if wanted != weighting:
            raise ConfigError(
                "weighting",
                weighting,
                f"contradicts divide_by_initial_world_size, which means {wanted!r}",
                "pass only one of the two",
            )
    # DDP needs it, too, for the steps in which it divides on its own.
    kwargs["divide_by_initial_world_size"] = weighting != "ranks"
    return weighting


def common_group(
    members: Sequence[Member], given: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    common = given
    for member in members:
        if member.group is None:
            continue
        if common is not None and member.group != common:
            raise ConfigError(
                "joinables",
                member.name,
                "uses another process group than the objects before it in the list",
                "use one Join per group",
            )
        common = member.group
    return common
