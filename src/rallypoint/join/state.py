"""What must be the same on all ranks when all are through, and taking it from one that had inputs to the end.

A rank that has run out steps its optimizer with the gradients as they were reduced. The others' loops may clip them
first, unscale them, or skip the step. So at the end the ranks compare digests, in an exchange that there is anyway;
nothing is sent unless they differ.
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


# Of an accelerator's tensor that is digested, at a time: the temporary copies take as many bytes.
CHUNK = 1 << 20
# Odd, so that no difference is multiplied away: 2**64 divided by the golden ratio, and a prime of xxHash.
WEIGHT, NEXT_CHUNK = -7046029254386353131, 1609587929392839161


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a rank holds, and that has to be what the others hold.

    Args:
        name: for messages.
        values: what it is now: tensors, numbers and text in any containers that PyTorch's trees know.
        take: called on all ranks if some rank differs: collective. It gets the rank whose part counts, and whether
            this rank is to keep its own.
    """

    name: str
    values: Callable[[], Any]
    take: Callable[[int, bool], None]


def digest(values: Any) -> int:
    """63 bits that differ if any bit of the values does, their shapes or types."""
    leaves, structure = tree_flatten(values)
    text = repr((str(structure), [_shown(leaf) for leaf in leaves]))
    found = hashlib.blake2b(text.encode(), digest_size=8)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            tensor = leaf.detach().contiguous()
            if tensor.device.type == "cpu":
                size = tensor.numel() * tensor.element_size()
                found.update((ctypes.c_char * size).from_address(tensor.data_ptr()))
            else:
                sums.setdefault(tensor.device, []).append(_sum_of_bits(tensor))
    for own in sums.values():  # one transfer for each device
        found.update(repr(torch.stack(own).tolist()).encode())
    return int.from_bytes(found.digest(), "big") >> 1


def _shown(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return [str(leaf.dtype), list(leaf.shape)]
    return repr(leaf)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A sum over the elements, each multiplied by a number that goes with its position."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.view(-1)
    size, width = flat.numel(), flat.element_size()
    wide = width == 8 or (size * width % 8 == 0 and flat.data_ptr() % 8 == 0)
    bits = flat.view(torch.int64 if wide else _INTEGERS[width])
    length = min(bits.numel(), CHUNK)
    # Overflow is fine: it is the same everywhere.
    weights = (2 * torch.arange(length, device=tensor.device) + 1) * WEIGHT
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK):  # type: ignore[no-untyped-call]
        total = total * NEXT_CHUNK + ((chunk.to(torch.int64) + 1) * weights[: len(chunk)]).sum()
    return total


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def share(
    values: Any, source: int, device: torch.device, group: dist.ProcessGroup | None, name: str
) -> Any:
    """The values of the rank ``source`` of the group.   Collective: two broadcasts, and one for each tensor.

    Args:
        values: this rank's; they are not changed.
        device: for messages.
        name: of what they are, for messages.

    Returns:
        On ``source`` the values themselves; elsewhere new ones, their tensors on the devices that those
        of ``source`` are on, or on ``device`` if these are no CPUs.

    Raises:
        JoinError: they hold something that cannot be pickled.
    """
    is_source = dist.get_rank(group) == source
    told: list[Any] = [None]
    if is_source:
        told = [_described(values)]
    # Any: the argument came with torch 2.6, its stubs later.
    from_source: dict[str, Any] = {"group": group, "group_src": source}
    dist.broadcast_object_list(told, device=device, **from_source)
    if isinstance(told[0], str):
        raise JoinError(
            f"rank {source} cannot tell the others the state of {name} after the steps that they only matched:"
            f" {told[0]}; iterate over join.batches(loader), which needs no such exchange"
        )
    leaves, structure = tree_flatten(values) if is_source else tree_flatten(told[0])
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and is_source:
            sent = leaf.detach().to(device).contiguous()
            dist.broadcast(sent, **from_source)
            found.append(leaf)
        elif isinstance(leaf, _Shape):
            held = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            dist.broadcast(held, **from_source)
            found.append(held.cpu() if leaf.on_cpu else held)
        else:
            found.append(leaf)
    return tree_unflatten(found, structure)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Stands for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def _described(values: Any) -> Any:
    """The same without tensors; a text if it cannot be told."""
    shapes = tree_map_only(
        torch.Tensor, lambda t: _Shape(tuple(t.shape), t.dtype, t.device.type == "cpu"), values
    )
    try:
        pickle.dumps(shapes)
    except Exception as error:  # noqa: BLE001  # whatever somebody's __reduce__ raises
        return f"{type(error).__name__}: {error}"
    return shapes
