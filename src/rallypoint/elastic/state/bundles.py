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


def send(tensors: Sequence[torch.Tensor], group: KeptGroup, to: Sequence[int]) -> int:
    """Send tensors to each of these ranks.   Blocks: until all are sent. Called in :meth:`.KeptGroup.transfer`.

    Returns:
        Bytes that one of them receives.
    """
    sizes = [each.nbytes for each in tensors]
    for indices in bundled(sizes):
        held = [tensors[index].detach() for index in indices]
        if len(held) == 1:
            group.send_now(held[0].contiguous(), *to)
            continue
        message, parts = _message(held)
        for part, each in zip(parts, held, strict=True):
            part.copy_(each)
        group.send_now(message, *to)
    return sum(sizes)


def receive(tensors: Sequence[torch.Tensor], group: KeptGroup, source: int) -> int:
    """Receive into tensors of the shapes and types of those that were sent.   Blocks: as :func:`send`.

    A large one that is contiguous is received in place.

    Returns:
        Bytes.
    """
    sizes = [each.nbytes for each in tensors]
    for indices in bundled(sizes):
        held = [tensors[index].detach() for index in indices]
        if len(held) == 1:
            (target,) = held
            place = target if target.is_contiguous() else torch.empty_like(target).contiguous()
            group.receive_now(place, source)
            if place is not target:
                target.copy_(place)
            continue
        message, parts = _message(held)
        group.receive_now(message, source)
        for part, each in zip(parts, held, strict=True):
            each.copy_(part)
    return sum(sizes)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _message(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Room for these tensors, and the part of it for each, in its shape and type."""
    message = torch.zeros(sum(_aligned(each.nbytes) for each in tensors), dtype=torch.uint8)
    parts, begin = [], 0
    for each in tensors:
        parts.append(message[begin : begin + each.nbytes].view(each.dtype).view(each.shape))
        begin += _aligned(each.nbytes)
    return message, parts
