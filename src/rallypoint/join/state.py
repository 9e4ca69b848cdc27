"""State that must be equal on all ranks at the end of a block, and how ranks copy it if it differs.

A rank that has run out steps its optimizer with the reduced gradients. The other ranks' loops may clip or unscale them
first, or skip the step. So at the end the ranks compare digests, as part of an exchange that takes place anyway,
and send state only if digests differ.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.errors import JoinError

from .torch_private import tree_flatten, tree_map_only, tree_unflatten


# How many elements of an accelerator's tensor to digest at a time; it bounds the memory for temporary copies.
CHUNK = 1 << 20
# Both are odd, so that multiplying never hides a difference: 2**64 divided by the golden ratio, and a prime of xxHash.
WEIGHT, NEXT_CHUNK = -7046029254386353131, 1609587929392839161


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of state that must be equal on all ranks.

    Args:
        name: for messages.
        values: returns the current value: tensors, numbers and text in containers that PyTorch's pytrees know.
        take: called on all ranks if any rank differs; collective. Arguments: the rank to copy from, and whether this rank
            keeps its own value.
    """

    name: str
    values: Callable[[], Any]
    take: Callable[[int, bool], None]


def digest(values: Any) -> int:
    """A 63-bit digest of all values, with their shapes and types."""
    leaves, structure = tree_flatten(values)
    text = repr((str(structure), [_shown(leaf) for leaf in leaves]))
    found = hashlib.blake2b(text.encode(), digest_size=8)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            continue
        for tensor in dense_parts(leaf):
            if not tensor.numel():
                continue
            if tensor.device.type == "cpu":
                size = tensor.numel() * tensor.element_size()
                found.update((ctypes.c_char * size).from_address(tensor.data_ptr()))
            else:
                sums.setdefault(tensor.device, []).append(_sum_of_bits(tensor))
    for own in sums.values():  # one transfer per device
        found.update(repr(torch.stack(own).tolist()).encode())
    return int.from_bytes(found.digest(), "big") >> 1


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The contiguous tensors that hold a tensor's content: itself, or the indices and values of a sparse one."""
    tensor = tensor.detach()
    if not tensor.is_sparse:
        return [tensor.contiguous()]
    tensor = tensor.coalesce()
    return [tensor.indices().contiguous(), tensor.values().contiguous()]


def _shown(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return [str(leaf.dtype), str(leaf.layout), list(leaf.shape)]
    return repr(leaf)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A sum over the elements, each weighted by its position."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.view(-1)
    size, width = flat.numel(), flat.element_size()
    wide = width == 8 or (size * width % 8 == 0 and flat.data_ptr() % 8 == 0)
    bits = flat.view(torch.int64 if wide else _INTEGERS[width])
    length = min(bits.numel(), CHUNK)
    # Overflow is fine: it wraps in the same way on all ranks.
    weights = (2 * torch.arange(length, device=tensor.device) + 1) * WEIGHT
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK):  # type: ignore[no-untyped-call]
        total = total * NEXT_CHUNK + ((chunk.to(torch.int64) + 1) * weights[: len(chunk)]).sum()
    return total


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def share(
    values: Any, source: int, device: torch.device, group: dist.ProcessGroup | None, name: str
) -> Any:
    """Broadcast values from rank ``source`` of the group.   Collective: two broadcasts, and one per tensor (two if sparse).

    Args:
        values: this rank's values; not modified.
        source: the sender's rank in the group.
        device: where the group's collectives work.
        group: the process group. None: the default group.
        name: what the values are, for messages.

    Returns:
        On ``source``, the values themselves. Elsewhere new values: tensors that are on the CPU at the source are on the CPU,
        all others on ``device``.

    Raises:
        JoinError: the values contain something that cannot be pickled.
    """
    is_source = dist.get_rank(group) == source
    told: list[Any] = [None]
    if is_source:
        told = [_described(values)]
    # Any: torch's stubs lack the argument.
    from_source: dict[str, Any] = {"group": group, "group_src": source}
    dist.broadcast_object_list(told, device=device, **from_source)
    if isinstance(told[0], str):
        raise JoinError(
            f"rank {source} cannot send the state of {name} to ranks that ran out early: {told[0]}; iterate over"
            " join.batches(loader), which does not exchange state"
        )
    leaves, structure = tree_flatten(values) if is_source else tree_flatten(told[0])
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and is_source:
            for part in dense_parts(leaf):
                dist.broadcast(part.to(device), **from_source)
            found.append(leaf)
        elif isinstance(leaf, _Shape):
            held = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in leaf.parts]
            for part in held:
                dist.broadcast(part, **from_source)
            tensor = held[0]
            if len(held) > 1:
                indices, values = held
                tensor = torch.sparse_coo_tensor(
                    indices, values, leaf.shape, is_coalesced=True, check_invariants=False
                )
            found.append(tensor.cpu() if leaf.on_cpu else tensor)
        else:
            found.append(leaf)
    return tree_unflatten(found, structure)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Stands for a tensor whose parts are sent separately."""

    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    on_cpu: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        parts = tuple((tuple(each.shape), each.dtype) for each in dense_parts(tensor))
        return cls(tuple(tensor.shape), parts, tensor.device.type == "cpu")


def _described(values: Any) -> Any:
    """The values with a shape in place of each tensor; if they cannot be pickled, the error as text."""
    shapes = tree_map_only(torch.Tensor, _Shape.of, values)
    try:
        pickle.dumps(shapes)
    except Exception as error:  # noqa: BLE001  # a __reduce__ may raise anything
        return f"{type(error).__name__}: {error}"
    return shapes
