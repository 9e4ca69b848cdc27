"""Small tensors that travel in one message.

A message costs a few tenths of a millisecond whatever is in it, and a model with an optimizer has thousands of biases, norms and
counters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rallypoint.elastic.communication.kept_group import KeptGroup


# Bytes: a tensor of up to this many is small; a message of small ones has at most so many.
SMALL, MOST = 256 << 10, 4 << 20
# Where a tensor of any type may begin.
_ALIGNED = 16


def bundled(sizes: Sequence[int]) -> list[list[int]]:
    """Which tensors travel together: their indices, message by message. Empty ones do not travel.

    Args:
        sizes: in bytes; the same on both sides.
    """
    alone = [[index] for index, size in enumerate(sizes) if size > SMALL]
    together: list[list[int]] = []
    end = MOST
    for index, size in enumerate(sizes):
        if 0 < size <= SMALL:
            if end + size > MOST:
                together.append([])
                end = 0
            together[-1].append(index)
            end = _aligned(end + size)
    return alone + together


def size_of(tensor: torch.Tensor) -> int:
    """In bytes."""
    return tensor.numel() * tensor.element_size()


def send(tensors: Sequence[torch.Tensor], group: KeptGroup, to: Sequence[int]) -> int:
    """Send tensors to each of these ranks.   Blocks: until all are sent. Called in :meth:`.KeptGroup.transfer`.

    Returns:
        Bytes that one of them receives.
    """
    sizes = [size_of(each) for each in tensors]
    for indices in bundled(sizes):
        first, *more = (tensors[index].detach() for index in indices)
        if not more:
            group.send_now(first.contiguous(), *to)
            continue
        message = _message([sizes[index] for index in indices])
        for part, each in zip(_parts(message, [first, *more]), (first, *more), strict=True):
            part.copy_(each)
        group.send_now(message, *to)
    return sum(sizes)


def receive(tensors: Sequence[torch.Tensor], group: KeptGroup, source: int) -> int:
    """Receive into tensors of the shapes and types of those that were sent.   Blocks: as :func:`send`.

    A large one that is contiguous is received in place.

    Returns:
        Bytes.
    """
    sizes = [size_of(each) for each in tensors]
    for indices in bundled(sizes):
        first, *more = (tensors[index].detach() for index in indices)
        if not more:
            place = first if first.is_contiguous() else torch.empty_like(first).contiguous()
            group.receive_now(place, source)
            if place is not first:
                first.copy_(place)
            continue
        message = _message([sizes[index] for index in indices])
        group.receive_now(message, source)
        for part, each in zip(_parts(message, [first, *more]), (first, *more), strict=True):
            each.copy_(part)
    return sum(sizes)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _message(sizes: Sequence[int]) -> torch.Tensor:
    return torch.zeros(sum(map(_aligned, sizes)), dtype=torch.uint8)


def _parts(message: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The part of a message for each tensor, in its shape and type."""
    found, begin = [], 0
    for each in tensors:
        size = size_of(each)
        found.append(message[begin : begin + size].view(each.dtype).view(each.shape))
        begin += _aligned(size)
    return found
