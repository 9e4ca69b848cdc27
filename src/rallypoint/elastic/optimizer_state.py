"""Loading an optimizer's state as it was, into the groups that it has.

``Optimizer.load_state_dict`` gives what belongs to a parameter the parameter's type: the float32 that NAdam multiplies up for a bfloat16
parameter becomes a bfloat16. A rank that has received its state would go on otherwise than the one that sent it. It also puts new groups in
the place of those that a schedule of the script's own may hold, which would then set the learning rate of nothing.
"""

from __future__ import annotations

from typing import Any

import torch


def load(given: Any, state: dict[str, Any], *, keeps_types: bool = True) -> None:
    """Make a state the present one.

    Args:
        given: an optimizer; other objects load their state themselves. So do optimizers with a ``load_state_dict`` of their own.
        state: from ``state_dict``.
        keeps_types: the parameters had the same types then.
    """
    plain = torch.optim.Optimizer
    if not isinstance(given, plain) or type(given).load_state_dict is not plain.load_state_dict:
        given.load_state_dict(state)
        return
    groups = given.param_groups
    given.load_state_dict(state)
    if keeps_types:
        _retype(given, state)
    for group, loaded in zip(groups, given.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    given.param_groups = groups


def _retype(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [each for group in state["param_groups"] for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state["state"] and parameter in optimizer.state:
            held = optimizer.state[parameter]
            optimizer.state[parameter] = _retyped(held, state["state"][number])


def _retyped(loaded: Any, before: Any) -> Any:
    """What was loaded, with the types of before."""
    if isinstance(loaded, torch.Tensor) and isinstance(before, torch.Tensor):
        is_same = loaded.dtype == before.dtype or loaded.shape != before.shape
        return loaded if is_same else before.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(before, dict):
        return {
            key: _retyped(value, before[key]) if key in before else value
            for key, value in loaded.items()
        }
    if (
        type(loaded) in (list, tuple)
        and type(before) is type(loaded)
        and len(loaded) == len(before)
    ):
        return type(loaded)(_retyped(*pair) for pair in zip(loaded, before, strict=True))
    return loaded
