"""Whole numbers: Python's, NumPy's, one-element tensors; not True, not 2.0, not "2"."""

from __future__ import annotations

import operator


def is_whole(value: object) -> bool:
    """Whether ``value`` can be used as an ``int``."""
    if isinstance(value, bool):
        return False  # an int in Python, but a mistake here
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
