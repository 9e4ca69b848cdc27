"""What counts as a whole number: Python's, NumPy's, a tensor of one; not True, not 2.0, not "2"."""

from __future__ import annotations

import operator


def is_whole(value: object) -> bool:
    """Whether it can stand where an ``int`` is expected."""
    if isinstance(value, bool):
        return False  # an int to Python, and a mistake
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
