"""Loading an optimizer's state as it was, into the groups that it has.

``Optimizer.load_state_dict`` gives what belongs to a parameter the parameter's type: the float32 that NAdam multiplies up for a bfloat16
parameter becomes a bfloat16. A rank that has received its state would go on otherwise than the one that sent it. It also puts new groups in
the place of those that a schedule of the script's own may hold, which would then set the learning rate of nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from rallypoint.elastic import torch_private


def part_of(given: Any) -> dict[str, Any]:
    """An object's state as it lies on this rank. That of ZeRO is its part: the whole has to be gathered from all ranks."""
    if not isinstance(given, torch.optim.Optimizer):
        return {"other": given.state_dict()}
    local = torch_private.local_optimizer(given)
    # ZeRO's own groups are handed to the optimizer of its part in each step.
    groups = [] if local is given else given.param_groups
    values = [{key: each for key, each in group.items() if key != "params"} for group in groups]
    return {"optimizer": local.state_dict(), "groups": values}


def load_part(given: Any, state: dict[str, Any]) -> None:
    """Make a state from :func:`part_of` the present one."""
    if "other" in state:
        given.load_state_dict(state["other"])
        return
    load(torch_private.local_optimizer(given), state["optimizer"])
    for group, values in zip(given.param_groups, state["groups"], strict=False):
        group.update(values)


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
    _lay_out(given)
    for group, loaded in zip(groups, given.param_groups, strict=True):
        kept = {key: _kept(group.get(key), value) for key, value in loaded.items()}
        group.clear()
        group.update(kept)
    given.param_groups = groups


def _kept(held: Any, loaded: Any) -> Any:
    """A group's value. A tensor of it (a learning rate) stays the one that the script may hold."""
    both = isinstance(held, torch.Tensor) and isinstance(loaded, torch.Tensor)
    if not both or held is loaded or (held.shape, held.dtype) != (loaded.shape, loaded.dtype):
        return loaded
    with torch.no_grad():
        return held.copy_(loaded)


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give what belongs to a parameter the parameter's layout in memory, which fused kernels take for granted.

    On its way from another rank or a disk it lies as plain tensors do.
    """
    for parameter, held in optimizer.state.items():
        if type(parameter) not in (torch.Tensor, torch.nn.Parameter) or not isinstance(held, dict):
            continue
        for key, value in held.items():
            if (
                type(value) is torch.Tensor
                and value.layout is parameter.layout is torch.strided
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                own = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                held[key] = own.detach().copy_(value)


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
