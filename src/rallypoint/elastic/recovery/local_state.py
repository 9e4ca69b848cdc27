"""The part of a session's state that is on this rank: as bytes for a snapshot, and back from one.

Of sharded tensors, this is the rank's part. Everything is put back into the same modules and optimizers, so whatever holds them
(FSDP's hooks, a scheduler) keeps working with them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch

from rallypoint.elastic import torch_private
from rallypoint.elastic.state import optimizer_state
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.state.plain_data import of_kind, plain
from rallypoint.elastic.storage.slots import ALIGNED
from rallypoint.errors import ElasticError


_TENSOR = "rallypoint tensor"
_SHARD = "rallypoint shard"


class LocalState:
    """This rank's part of the state.

    Args:
        objects: what the session was given.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    @torch.no_grad()
    def pack(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The structure and the tensors. The tensors are the state itself, not copies.

        Raises:
            ElasticError: an optimizer's state is sharded differently from its parameters.
        """
        tensors = list(self._objects.local_tensors())
        in_place = len(tensors)
        rest = []
        for each in self._objects.others:
            parameters = _parameters_of(each)
            state = optimizer_state.part_of(each)
            if parameters:
                held = {
                    key: _emptied(value, tensors, _owner(key, parameters))
                    for key, value in state["optimizer"]["state"].items()
                }
                state = {**state, "optimizer": {**state["optimizer"], "state": held}}
            rest.append(_emptied(state, tensors, None))
        structure = {
            "in place": in_place,
            "buffers": self._objects.buffers.told(),
            "rest": rest,
            "groups": self._objects.groups(),
            "gradients": [each is not None for each in self._objects.gradients()],
            "modes": self._objects.modes.told(),
            "passed": self._objects.passed(),
        }
        return structure, tensors

    @torch.no_grad()
    def restore(self, structure: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Make it the current state.

        Args:
            structure: from :meth:`pack`.
            tensors: as bytes (``[n]``, uint8), which are copied.
        """
        for module in self._objects.modules:
            torch_private.reset_fsdp(module)
        # A forward pass may have assigned other buffers, of other shapes.
        self._objects.buffers.take(structure["buffers"])
        own = list(self._objects.local_tensors())
        for each, held in zip(own, tensors[: structure["in place"]], strict=True):
            _fill(each, held)
        others, groups = self._objects.others, structure["groups"]
        for each, held in zip(others, groups, strict=True):
            if isinstance(each, torch.optim.Optimizer):
                del each.param_groups[len(held) :]  # these were added later
        # The parameters come first: the tensors of their state, filled below, are sharded like them.
        options = [
            state.get("optimizer", {}).get("param_groups", ()) for state in structure["rest"]
        ]
        options = [_filled_value(each, tensors, None) for each in options]
        self._objects.add_missing_groups(groups, options)
        for each, state in zip(others, structure["rest"], strict=True):
            optimizer_state.load_part(each, _filled(state, tensors, _parameters_of(each)))
        self._objects.set_gradients(structure["gradients"])
        self._objects.modes.take(structure["modes"])
        self._objects.go_back_to(structure["passed"])


def laid_out(
    head: bytes, tensors: list[torch.Tensor]
) -> tuple[int, Iterator[tuple[int, torch.Tensor]]]:
    """How a head and tensors are laid out in a slot: the size of the contents, and its pieces."""
    first = torch.frombuffer(
        bytearray(len(head).to_bytes(ALIGNED, "little") + head), dtype=torch.uint8
    )
    begins, at = [], 0
    for size in (first.numel(), *(each.numel() * each.element_size() for each in tensors)):
        begins.append(at)
        at += size + -size % ALIGNED

    def pieces() -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, first
        for begin, each in zip(begins[1:], tensors, strict=True):
            if each.numel():
                yield begin, _as_bytes(each)

    return at, pieces()


def taken_apart(contents: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """The head, and what follows it."""
    size = int.from_bytes(bytes(contents[:ALIGNED].tolist()), "little")
    end = ALIGNED + size
    return bytes(contents[ALIGNED:end].numpy()), contents[end + -end % ALIGNED :]


def tensors_in(contents: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """The tensors that follow one another in the contents, as bytes."""
    found, at = [], 0
    for size in sizes:
        found.append(contents[at : at + size])
        at += size + -size % ALIGNED
    return found


def packed(structure: Any) -> bytes:
    """As bytes that :func:`unpacked` reads without executing anything."""
    data = io.BytesIO()
    torch.save(structure, data)
    return data.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _fill(tensor: torch.Tensor, held: torch.Tensor) -> None:
    if tensor.numel():
        tensor.copy_(held.view(tensor.dtype).view(tensor.shape))


# -- state_dict; an optimizer's with the parameter that each part belongs to --------------------------------------------


def _parameters_of(given: Any) -> list[torch.Tensor]:
    """The parameters of an optimizer, in the order in which its state numbers them."""
    if not isinstance(given, torch.optim.Optimizer):
        return []
    local = torch_private.local_optimizer(given)
    return [each for group in local.param_groups for each in group["params"]]


def _owner(key: Any, parameters: list[torch.Tensor]) -> torch.Tensor | None:
    """The parameter whose state is under a key; None if it is no parameter's."""
    return parameters[key] if type(key) is int and key < len(parameters) else None


def _emptied(state: Any, tensors: list[torch.Tensor], owner: torch.Tensor | None) -> Any:
    """``state``, with each tensor replaced by its place in ``tensors``."""
    if isinstance(state, torch.Tensor):
        kind = _TENSOR
        if torch_private.is_sharded(state):
            if owner is None or not torch_private.is_sharded_alike(state, owner):
                raise ElasticError(
                    "elastic.session: an object's state has a tensor that is sharded differently from the parameter it"
                    " belongs to; snapshots cannot hold it"
                )
            kind = _SHARD
        local = torch_private.local_part(state)
        tensors.append(local)
        dtype = str(local.dtype).removeprefix("torch.")
        return [kind, len(tensors) - 1, dtype, list(local.shape)]
    if isinstance(state, dict):
        items = {plain(key): _emptied(value, tensors, owner) for key, value in state.items()}
        return of_kind(state, items)
    if type(state) in (list, tuple):
        return type(state)(_emptied(each, tensors, owner) for each in state)
    return plain(state)


def _filled(state: Any, tensors: list[torch.Tensor], parameters: list[torch.Tensor]) -> Any:
    if parameters and "optimizer" in state:
        optimizer = state["optimizer"]
        held = {
            key: _filled_value(value, tensors, _owner(key, parameters))
            for key, value in optimizer["state"].items()
        }
        state = {**state, "optimizer": {**optimizer, "state": held}}
    return _filled_value(state, tensors, None)


def _filled_value(state: Any, tensors: list[torch.Tensor], owner: torch.Tensor | None) -> Any:
    if isinstance(state, list) and len(state) == 4 and state[0] in (_TENSOR, _SHARD):
        kind, number, name, shape = state
        dtype = getattr(torch, name)
        if kind == _SHARD:
            assert owner is not None
            whole = torch.zeros_like(owner, dtype=dtype)
            _fill(torch_private.local_part(whole), tensors[number])
            return whole
        own = torch.empty(shape, dtype=dtype)
        _fill(own, tensors[number])
        return own
    if isinstance(state, dict):
        items = {key: _filled_value(value, tensors, owner) for key, value in state.items()}
        return of_kind(state, items)
    if type(state) in (list, tuple):
        return type(state)(_filled_value(each, tensors, owner) for each in state)
    return state
