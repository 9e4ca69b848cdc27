"""Copies of states, into the memory of earlier copies."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch


def copied(state: Any, into: Any = None) -> Any:
    """Like :func:`copy.deepcopy`, without autograd graphs.

    Args:
        state: tensors in lists, tuples and dicts, and other values.
        into: an earlier copy that nobody uses any more: its tensors are overwritten where they fit. Newly allocated memory
            costs more than the copying.
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


def num_bytes(state: Any) -> Counter[torch.device]:
    """The bytes of all tensors in lists, tuples and dicts, by device."""
    found: Counter[torch.device] = Counter()
    if isinstance(state, torch.Tensor):
        found[state.device] = state.nbytes
    elif isinstance(state, dict):
        found.update(num_bytes(list(state.values())))
    elif isinstance(state, list | tuple):
        for each in state:
            found.update(num_bytes(each))
    return found
