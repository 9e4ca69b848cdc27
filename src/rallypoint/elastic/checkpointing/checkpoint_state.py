"""A session's objects as the nested state of a checkpoint, and back.

The layout is the usual one for ``torch.distributed.checkpoint`` (DCP): ``model`` holds a module's state, with the names that it
has without DDP and ``torch.compile``; ``optimizer`` holds an optimizer's state, with parameters by name. DCP turns keys into
strings and leaves out what is empty, so the exact structure is stored beside it, for our own loading.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rallypoint.elastic import torch_private
from rallypoint.elastic.state import optimizer_state
from rallypoint.elastic.state.loose_parameters import LooseParameters
from rallypoint.elastic.state.plain_data import of_kind, plain
from rallypoint.errors import ElasticError

from .shards import Shard


# Marks a tensor in a structure; the tensor's key follows.
TENSOR = "rallypoint tensor"


def roles(given: Sequence[Any]) -> list[str]:
    """A name for each object: ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``parameters`` (of no module), or its class.
    The second model is ``model_2``, and so on."""
    names: list[str] = []
    seen: dict[str, int] = {}
    for each in given:
        role = _role(each)
        seen[role] = seen.get(role, 0) + 1
        names.append(role if seen[role] == 1 else f"{role}_{seen[role]}")
    return names


def _role(given: Any) -> str:
    if isinstance(given, LooseParameters):
        return "parameters"
    if isinstance(given, nn.Module):
        return "model"
    if isinstance(given, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    if isinstance(given, torch.amp.GradScaler):
        return "scaler"
    return type(given).__name__.lower()


class State:
    """The state of a session's objects.

    Args:
        given: the objects.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = tuple(given)
        self.roles = roles(given)
        self._modules = [each for each in given if isinstance(each, nn.Module)]

    def now(self) -> dict[str, Any]:
        """The current state by role. Tensors are not copied."""
        return {
            role: self._state_of(each) for role, each in zip(self.roles, self._given, strict=True)
        }

    def owners(self) -> dict[str, Any]:
        """The sharded tensors, by their key in a checkpoint. An optimizer's state for a parameter is sharded like the parameter;
        its keys begin with the key given here."""
        found: dict[str, Any] = {}
        for role, each in zip(self.roles, self._given, strict=True):
            if isinstance(each, nn.Module):
                for name, value in self._state_of(each).items():
                    if torch_private.is_tensor_sharded(value):
                        found[f"{role}.{name}"] = value
            elif isinstance(each, torch.optim.Optimizer):
                parameters = [one for group in each.param_groups for one in group["params"]]
                names: Sequence[object] = self._names_of(each) or range(len(parameters))
                for key, one in zip(names, parameters, strict=True):
                    if torch_private.is_tensor_sharded(one):
                        found[f"{role}.state.{key}."] = one
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Make a state the current one.

        Args:
            state: as :meth:`now` returned it; further entries are ignored.
        Raises:
            ElasticError: the objects are not those of the checkpoint.
        """
        lacking = [role for role in self.roles if role not in state]
        if lacking:
            raise ElasticError(f"it holds no {lacking[0]!r}, only {', '.join(map(repr, state))}")
        keeps_types = self._has_types_of(state)
        for role, each in zip(self.roles, self._given, strict=True):
            try:
                self._restore(each, state[role], keeps_types=keeps_types)
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ElasticError(f"its {role!r} belongs to another object: {error}") from error

    def flags(self, changed: Iterable[tuple[nn.Module | torch.Tensor, bool]]) -> dict[str, bool]:
        """The modes of modules and of parameters that training has changed, by name."""
        named = {id(each): name for name, each in self._named_parts().items()}
        return {named[id(each)]: flag for each, flag in changed if id(each) in named}

    def restore_flags(self, flags: Mapping[str, bool]) -> None:
        """Set what :meth:`flags` returned. What this program's modules lack is ignored."""
        parts = self._named_parts()
        for name in flags.keys() & parts.keys():
            each, flag = parts[name], flags[name]
            if isinstance(each, nn.Module):
                each.training = flag
            else:
                each.requires_grad_(flag)

    def _named_parts(self) -> dict[str, nn.Module | torch.Tensor]:
        """All modules and parameters. Of a wrapper and the module in it, which have one name, it is the latter."""
        found: dict[str, nn.Module | torch.Tensor] = {}
        for role, each in zip(self.roles, self._given, strict=True):
            if isinstance(each, nn.Module):
                names = _clean_names(each)
                for name, part in each.named_modules():
                    # A parameter's name has no dot at its end.
                    found[f"{role}.{_clean(f'{name}.' if name else '', names)}"] = part
                for name, parameter in each.named_parameters():
                    found[f"{role}.{_clean(name, names)}"] = parameter
        return found

    def _state_of(self, given: Any) -> Any:
        if isinstance(given, nn.Module):
            names = _clean_names(given)
            return {_clean(key, names): value for key, value in given.state_dict().items()}
        if isinstance(given, torch.optim.Optimizer):
            return self._named(given)
        return given.state_dict()

    def _has_types_of(self, state: Mapping[str, Any]) -> bool:
        """Whether all parameters have the types that they had then: a script may continue in bfloat16, and so its optimizer."""
        now = {
            f"{role}.{key}": value.dtype
            for role, each in zip(self.roles, self._given, strict=True)
            if isinstance(each, nn.Module)
            for key, value in self._state_of(each).items()
            if isinstance(value, torch.Tensor)
        }
        then = {
            f"{role}.{key}": value.dtype
            for role in self.roles
            if isinstance(state[role], Mapping)
            for key, value in state[role].items()
            if isinstance(value, torch.Tensor)
        }
        return all(then.get(key, dtype) == dtype for key, dtype in now.items())

    def _restore(self, given: Any, state: Any, *, keeps_types: bool) -> None:
        if isinstance(given, nn.Module):
            names = _clean_names(given)
            given.load_state_dict(
                {key: state[_clean(key, names)] for key in given.state_dict()}, strict=True
            )
            unknown = set(state) - {_clean(key, names) for key in given.state_dict()}
            if unknown:
                raise ValueError(f"this one has no {min(unknown)!r}")
        elif isinstance(given, torch.optim.Optimizer):
            optimizer_state.load(given, self._numbered(given, state), keeps_types=keeps_types)
        else:
            given.load_state_dict(state)

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[str] | None:
        """The names of an optimizer's parameters, in its order; None if no single module has them all."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for module in self._modules:
            wrapped = _clean_names(module)
            named = {
                id(each): _clean(name, wrapped)
                for name, each in module.named_parameters(remove_duplicate=False)
            }
            if all(id(each) in named for each in parameters):
                names = [named[id(each)] for each in parameters]
                return names if len(set(names)) == len(names) else None
        return None

    def _named(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        names = self._names_of(optimizer)
        if names is None or not _is_usual(state):
            return state
        groups = [
            {**group, "params": [names[each] for each in group["params"]]}
            for group in state["param_groups"]
        ]
        # What a script's own optimizer keeps under other keys stays there.
        count = len(names)
        by_name = {
            names[key] if type(key) is int and key < count else key: value
            for key, value in state["state"].items()
        }
        return {**state, "state": by_name, "param_groups": groups}

    def _numbered(self, optimizer: torch.optim.Optimizer, state: Any) -> dict[str, Any]:
        names = self._names_of(optimizer)
        if names is None or not _is_usual(state):
            return dict(state)
        number_of = {name: number for number, name in enumerate(names)}
        groups = [
            {**group, "params": [number_of[each] for each in group["params"]]}
            for group in state["param_groups"]
        ]
        by_number = {number_of.get(name, name): value for name, value in state["state"].items()}
        return {**state, "state": by_number, "param_groups": groups}


def _is_usual(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state has the usual parts. One that wraps another may have the other's state as one of its parts."""
    return "state" in state and "param_groups" in state


def _clean_names(module: nn.Module) -> list[tuple[str, str]]:
    """The prefixes of names inside wrappers, innermost first, each with the prefix that names have without the wrapper."""
    found = []
    for path, part in module.named_modules():
        start = f"{path}." if path else ""
        if isinstance(part, DistributedDataParallel):
            found.append((f"{start}module.", start))
        elif torch_private.is_compiled(part):
            found.append((f"{start}{torch_private.COMPILED}.", start))
    return found[::-1]


def _clean(name: str, wrapped: Sequence[tuple[str, str]]) -> str:
    for start, without in wrapped:
        if name.startswith(start):
            name = without + name[len(start) :]
    return name


class HostCopy:
    """A copy of a state in host memory. The memory is reused for the next copy.

    Attributes:
        nested: for DCP: dicts, lists, tensors and other leaves.
        structure: the exact tree, with ``[TENSOR, key]`` for tensors; keys are DCP's.
        shards: this rank's parts of sharded tensors, which ``nested`` holds as well, by key.
    """

    def __init__(self) -> None:
        self.nested: dict[str, Any] = {}
        self.structure: Any = None
        self.shards: dict[str, Shard] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def take(self, state: Mapping[str, Any]) -> None:
        """Copy all tensors and leaves. Blocks: until the copies are complete."""
        before, self._tensors = self._tensors, {}
        self.nested, self.structure, self.shards = {}, {}, {}
        devices: set[torch.device] = set()
        with torch.no_grad():
            for role, each in state.items():
                self.nested[role], self.structure[role] = self._copied(each, role, before, devices)
        for device in devices:
            torch.accelerator.synchronize(device)

    def _copied(
        self, state: Any, path: str, before: Mapping[str, torch.Tensor], devices: set[torch.device]
    ) -> tuple[Any, Any]:
        if isinstance(state, torch.Tensor):
            owner, state = state, torch_private.local_part(state)
            held = before.get(path)
            if held is None or held.shape != state.shape or held.dtype != state.dtype:
                held = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
            held.copy_(state.detach(), non_blocking=True)
            if state.device.type != "cpu":
                devices.add(state.device)
            self._tensors[path] = held
            if torch_private.is_tensor_sharded(owner):
                self.shards[path] = shard = Shard.like(owner, held)
                return shard, [TENSOR, path]
            return held, [TENSOR, path]
        if isinstance(state, Mapping):
            nested, exact = {}, {}
            for key, value in state.items():
                key = plain(key)
                nested[str(key)], exact[key] = self._copied(value, f"{path}.{key}", before, devices)
            return nested, of_kind(state, exact)
        # Not subclasses: a named tuple is constructed differently, and is a class of the user's, which is reported on writing.
        if type(state) in (list, tuple) and _has_parts(state):
            pairs = [
                self._copied(value, f"{path}.{number}", before, devices)
                for number, value in enumerate(state)
            ]
            return [each for each, _ in pairs], type(state)(exact for _, exact in pairs)
        if type(state) in (list, tuple):
            state = type(state)(self._copied(each, path, before, devices)[1] for each in state)
            return state, state
        leaf = copy.deepcopy(plain(state))
        return leaf, leaf


def _has_parts(state: Any) -> bool:
    """Whether DCP descends into a list: it holds tensors or mappings, at any depth."""
    return any(
        isinstance(each, torch.Tensor | Mapping)
        or (isinstance(each, list | tuple) and _has_parts(each))
        for each in state
    )


def keys_in(structure: Any) -> list[str]:
    """The keys of all tensors in a structure."""
    if isinstance(structure, list) and len(structure) == 2 and structure[0] == TENSOR:
        return [structure[1]]
    if isinstance(structure, Mapping):
        return [key for each in structure.values() for key in keys_in(each)]
    if isinstance(structure, list | tuple):
        return [key for each in structure for key in keys_in(each)]
    return []


def filled(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A structure with its tensors filled in."""
    if isinstance(structure, list) and len(structure) == 2 and structure[0] == TENSOR:
        return tensors[structure[1]]
    if isinstance(structure, Mapping):
        return {key: filled(value, tensors) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        return type(structure)(filled(each, tensors) for each in structure)
    return structure
