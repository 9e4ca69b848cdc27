"""Reports the steps that frameworks count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from rallypoint._core.step_reports import MAX_METRICS, progress


# Names of progress()'s parameters, which a script may also give to its own numbers.
_TAKEN = {"step", "total"}


def report(step: Any, total: Any, numbers: Mapping[str, Any]) -> None:
    """Call :func:`rallypoint.progress` with any numbers under any names. Those it has no room for are left out.

    Args:
        step: how many steps are complete.
        total: how many there are in all; None, NaN or infinity: unknown.
        numbers: by name. Values that are not numbers are left out.
    """
    if isinstance(total, float) and not math.isfinite(total):
        total = None
    if len(numbers) > MAX_METRICS or not _TAKEN.isdisjoint(numbers):
        free = ((name, value) for name, value in numbers.items() if name not in _TAKEN)
        numbers = dict(itertools.islice(free, MAX_METRICS))
    progress(step, total, **numbers)
