"""Digests of states: equal on ranks that hold the same state."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch

from rallypoint.elastic import torch_private

from .plain_data import plain


def digest(state: Any) -> str:
    """A digest of tensors, numbers and text in dicts, lists, tuples and sets. Of other values, only the class counts."""
    found = hashlib.blake2b(digest_size=8)
    for each in _parts(state):
        found.update(each)
    return found.hexdigest()


def _parts(state: Any) -> list[bytes | memoryview]:
    """What the digest is made of: lengths and classes tell apart what is nested differently."""
    state = plain(state)
    kind = type(state).__qualname__
    if isinstance(state, torch.Tensor):
        local = torch_private.local_part(state.detach())
        text = f"{kind} {local.dtype} {tuple(local.shape)} "
        if local.layout is not torch.strided or local.is_quantized:
            return [text.encode()]
        return [text.encode(), local.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data]
    if isinstance(state, dict):
        pairs = [part for pair in state.items() for each in pair for part in _parts(each)]
        return [f"{kind} {len(state)} ".encode(), *pairs]
    if isinstance(state, list | tuple):
        return [
            f"{kind} {len(state)} ".encode(),
            *(part for each in state for part in _parts(each)),
        ]
    if isinstance(state, set | frozenset):
        return [f"{kind} ".encode(), *sorted(b"".join(_parts(each)) for each in state)]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(state, numpy.ndarray) and not state.dtype.hasobject:
        return [f"{kind} {state.dtype} {state.shape} ".encode(), state.tobytes()]
    if state is None or isinstance(state, bool | int | float | complex | str | bytes):
        return [f"{kind} {state!r} ".encode()]
    return [f"{kind} ".encode()]
