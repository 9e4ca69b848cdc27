"""Which parameters an optimizer has in which group: a script may add groups as it trains, and a replacement process lacks them.

Parameters are identified by their number among those of the session's modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rallypoint.errors import ElasticError


# For each group, its parameters' numbers; None for a parameter that belongs to no module of the session.
Members = list[list[int | None]]


def members(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Members:
    """The groups of an optimizer."""
    number = {id(each): index for index, each in enumerate(parameters)}
    return [[number.get(id(each)) for each in group["params"]] for group in optimizer.param_groups]


def add_missing(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    wanted: Members,
    options: Sequence[dict[str, Any]],
) -> None:
    """Add the groups that only another rank's optimizer has.

    Args:
        optimizer: this rank's.
        parameters: of the session's modules.
        wanted: the groups on the other rank.
        options: what each of these groups has besides ``params``.
    Raises:
        ElasticError: the groups that both have differ, or a parameter cannot be found here.
    """
    own = members(optimizer, parameters)
    if own == wanted:
        return
    kind = type(optimizer).__name__
    if own != wanted[: len(own)]:
        raise ElasticError(
            f"elastic.session: a {kind} on this rank has different parameter groups ({len(own)}) from that on the other ranks ({len(wanted)}):"
            " create it the same way on all ranks before the session, and change its groups only with add_param_group"
        )
    for numbers, given in zip(wanted[len(own) :], options[len(own) :], strict=True):
        found = [parameters[each] for each in numbers if each is not None]
        if len(found) < len(numbers):
            raise ElasticError(
                f"elastic.session: add_param_group has given a {kind} parameters that belong to no module of the session, so a"
                " process that replaces a lost rank cannot find them: give their module to elastic.session, too"
            )
        more = {key: each for key, each in given.items() if key not in {"params", "param_names"}}
        named = zip(given["param_names"], found, strict=True) if "param_names" in given else found
        optimizer.add_param_group({**more, "params": list(named)})
    _Added(optimizer, optimizer.param_groups[len(own) :])


class _Added:
    """Groups that were added here already. The script starts at the current epoch, and may still reach the code that adds them.

    Args:
        optimizer: the one whose ``add_param_group`` this replaces until the script has added them.
        groups: the ones that were added.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
        self._optimizer = optimizer
        self._groups = [[id(each) for each in group["params"]] for group in groups]
        self._original = optimizer.add_param_group
        vars(optimizer)["add_param_group"] = self

    def __call__(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        # An iterator can only be used once.
        given = given if isinstance(given, torch.Tensor) else list(given)
        found = [given] if isinstance(given, torch.Tensor) else given
        group = [id(each[1] if isinstance(each, tuple) else each) for each in found]
        if group not in self._groups:
            self._original({**param_group, "params": given})
            return
        self._groups.remove(group)
        if not self._groups:
            vars(self._optimizer)["add_param_group"] = self._original
