"""Steps as frameworks know them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from rallypoint._core.step_reports import MAX_METRICS, progress


# A script's own names, which may be those of progress()'s parameters.
_TAKEN = {"step", "total"}


def report(step: Any, total: Any, numbers: Mapping[str, Any]) -> None:
    """:func:`rallypoint.progress` for any numbers by any names: those it has no room for are left out.

    Args:
        step: how many are complete.
        total: of how many; None, NaN or infinity: not known.
        numbers: by name. What is no number is left out.
    """
    if isinstance(total, float) and not math.isfinite(total):
        total = None
    if len(numbers) > MAX_METRICS or not _TAKEN.isdisjoint(numbers):
        free = ((name, value) for name, value in numbers.items() if name not in _TAKEN)
        numbers = dict(itertools.islice(free, MAX_METRICS))
    progress(step, total, **numbers)
