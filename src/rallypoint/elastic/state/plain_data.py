"""What states are made of besides tensors, for torch's restricted unpickler: it executes nothing, so it knows few classes."""

from __future__ import annotations

import io
import sys
from collections import Counter, OrderedDict
from typing import Any

import torch


_PLAIN = frozenset({type(None), bool, int, float, str})


def of_kind(given: Any, items: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the same class as another one, if torch's restricted unpickler knows the class; else a plain dict."""
    return type(given)(items) if type(given) in (Counter, OrderedDict) else items


def plain(value: Any) -> Any:
    """A NumPy number (such as a learning rate from a schedule with ``np.cos``) as a Python number; anything else as it is."""
    if type(value) in _PLAIN:
        return value
    numpy = sys.modules.get("numpy")  # nobody has a NumPy number without having imported it
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def unreadable(state: Any) -> str:
    """The first value that could not be read back: its keys and its class. Empty if there is none.

    Args:
        state: nested dicts, lists and tuples of data, without tensors.
    """
    if _is_read(state):
        return ""
    pairs: Any = ()
    if isinstance(state, dict):
        pairs = state.items()
    elif isinstance(state, list | tuple):
        pairs = enumerate(state)
    for key, value in pairs:
        if found := unreadable(value):
            return f"[{key!r}]{found}"
    kind = type(state)
    return f", a {kind.__module__}.{kind.__qualname__}"


def _is_read(state: Any) -> bool:
    if type(state) in _PLAIN:
        return True
    data = io.BytesIO()
    try:
        torch.save(state, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception:  # noqa: BLE001  pickling calls classes of the user's
        return False
    return True
