"""State other than parameters that each rank has on its own: the memory of a communication hook, and a model averager's count.

PowerSGD adds to each gradient what compression lost from the last one, and that error differs between ranks. Local SGD lets the
parameters of ranks differ until they are averaged, every few steps. Nobody else has such state, so it belongs in snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from rallypoint.elastic import torch_private


class HookState:
    """The state of a hook, with the two methods of a session's objects.

    Args:
        state: torch's object; state is loaded into it.
        device: of the gradients.
    """

    def __init__(self, state: Any, device: torch.device) -> None:
        self.state = state
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        state = self.state
        found: dict[str, Any] = {
            "counts": {name: getattr(state, name) for name in _held(state, _COUNTS)},
            "memory": {name: dict(getattr(state, name)) for name in _held(state, _MEMORY)},
        }
        for name in _held(state, _GENERATORS):
            kind, key, *rest = getattr(state, name).get_state()
            found[name] = [kind, torch.tensor(key.tolist()), *rest]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["counts"].items():
            setattr(self.state, name, value)
        for name, tensors in state["memory"].items():
            memory = getattr(self.state, name)
            memory.clear()
            memory.update((bucket, each.to(self._device)) for bucket, each in tensors.items())
        for name in _held(self.state, _GENERATORS):
            kind, key, *rest = state[name]
            getattr(self.state, name).set_state((kind, key.tolist(), *rest))


class AveragerState:
    """How many steps a model averager has seen.

    Args:
        averager: torch's.
    """

    def __init__(self, averager: Any) -> None:
        self.averager = averager

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.averager.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averager.step = state["step"]


def with_averagers(given: Iterable[Any]) -> Iterator[Any]:
    """A session's objects, with averagers wrapped to have state. One that an optimizer calls follows its inner optimizer."""
    seen: set[int] = set()
    for each in given:
        averager = torch_private.averager_of(each)
        if averager is None:
            yield each
            continue
        if averager is not each:
            yield each.optim
        if id(averager) not in seen:
            seen.add(id(averager))
            yield AveragerState(averager)


def of_hooks(nets: Iterable[DistributedDataParallel]) -> list[HookState]:
    """The hook states of DDP modules. Several modules may share one."""
    found: dict[int, HookState] = {}
    for net in nets:
        device = next(net.parameters()).device
        for state in torch_private.states_of_hooks(net):
            found.setdefault(id(state), HookState(state, device))
    return list(found.values())


_COUNTS = torch_private.COUNTS_OF_HOOKS
_MEMORY = torch_private.MEMORY_OF_HOOKS
_GENERATORS = torch_private.GENERATORS_OF_HOOKS


def _held(state: Any, names: Iterable[str]) -> list[str]:
    return [name for name in names if hasattr(state, name)]
