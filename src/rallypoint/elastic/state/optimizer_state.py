"""Loading an optimizer's state unchanged, into the groups that it has.

``Optimizer.load_state_dict`` casts a parameter's state to the parameter's type: the float32 product that NAdam keeps for a
bfloat16 parameter becomes a bfloat16. A rank that received its state would then diverge from the sender. It also replaces the
groups, which a schedule of the script's own may hold: that would then set a learning rate that nothing uses.
"""

from __future__ import annotations

from typing import Any

import torch

from rallypoint.elastic import torch_private


def part_of(given: Any) -> dict[str, Any]:
    """An object's state on this rank. For ZeRO this is its part: the whole would have to be gathered from all ranks."""
    if not isinstance(given, torch.optim.Optimizer):
        return {"other": given.state_dict()}
    local = torch_private.local_optimizer(given)
    # In each step, ZeRO passes its own groups on to the optimizer of its part.
    groups = [] if local is given else given.param_groups
    values = [{key: each for key, each in group.items() if key != "params"} for group in groups]
    return {"optimizer": local.state_dict(), "groups": values}


def load_part(given: Any, state: dict[str, Any]) -> None:
    """Make a state from :func:`part_of` the current one."""
    if "other" in state:
        given.load_state_dict(state["other"])
        return
    load(torch_private.local_optimizer(given), state["optimizer"])
    for group, values in zip(given.param_groups, state["groups"], strict=False):
        group.update(values)


def load(given: Any, state: dict[str, Any], *, keeps_types: bool = True) -> None:
    """Make a state the current one.

    Args:
        given: an optimizer. Other objects load their state themselves, and so do optimizers with their own ``load_state_dict``.
        state: from ``state_dict``.
        keeps_types: the parameters had the same types when the state was taken.
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
    """A group's value. If it is a tensor (a learning rate), it stays the same object, which the script may hold."""
    both = isinstance(held, torch.Tensor) and isinstance(loaded, torch.Tensor)
    if not both or held is loaded or (held.shape, held.dtype) != (loaded.shape, loaded.dtype):
        return loaded
    with torch.no_grad():
        return held.copy_(loaded)


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give a parameter's state the parameter's memory layout, which fused kernels rely on.

    Tensors that come from another rank or from disk have the default layout.
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
    """What was loaded, with the types that it had before."""
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
