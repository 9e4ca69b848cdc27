"""Copies of states, into the memory of earlier copies."""

from __future__ import annotations

import copy
from typing import Any

import torch


def copied(state: Any, into: Any = None) -> Any:
    """As :func:`copy.deepcopy`, without graphs.

    Args:
        state: tensors in lists, tuples and dicts, and other values.
        into: an earlier copy, which nobody uses any more: its tensors are overwritten where they fit. Memory that was just
            allocated costs more than the copying.
    """
    if isinstance(state, torch.Tensor):
        source = state.detach()
        return into.copy_(source) if _fits(source, into) else source.clone()
    if type(state) is dict:
        held = into if type(into) is dict else {}
        return {key: copied(value, held.get(key)) for key, value in state.items()}
    if type(state) in (list, tuple):
        earlier = (
            into if type(into) is type(state) and len(into) == len(state) else [None] * len(state)
        )
        return type(state)(copied(*pair) for pair in zip(state, earlier, strict=True))
    return copy.deepcopy(state)


def _fits(source: torch.Tensor, into: Any) -> bool:
    return (
        type(source) is type(into) is torch.Tensor
        and (source.shape, source.dtype, source.device) == (into.shape, into.dtype, into.device)
        and source.layout is into.layout is torch.strided
        and source.stride() == into.stride()
    )


def num_bytes(state: Any) -> int:
    """Of all tensors in lists, tuples and dicts."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, dict):
        state = state.values()
    elif type(state) not in (list, tuple):
        return 0
    return sum(map(num_bytes, state))
