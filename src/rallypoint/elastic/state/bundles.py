"""Small tensors that travel in one message.

A message costs a few tenths of a millisecond whatever its size, and a model with an optimizer has thousands of biases, norms and
counters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rallypoint.elastic.communication.kept_group import KeptGroup


# Bytes: the size up to which a tensor is small, and the most that a message of small tensors holds.
SMALL, MOST = 256 << 10, 4 << 20
# The alignment that a tensor of any type may need.
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
        The number of bytes that each of them receives.
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
    """Receive into tensors of the same shapes and types as those sent.   Blocks: like :func:`send`.

    A large contiguous tensor is received in place.

    Returns:
        The number of bytes.
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
    """A message with room for these tensors, and the part for each, in its shape and type."""
    message = torch.zeros(sum(_aligned(each.nbytes) for each in tensors), dtype=torch.uint8)
    parts, begin = [], 0
    for each in tensors:
        parts.append(message[begin : begin + each.nbytes].view(each.dtype).view(each.shape))
        begin += _aligned(each.nbytes)
    return message, parts
