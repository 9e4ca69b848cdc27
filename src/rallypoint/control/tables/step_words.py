"""How far a worker is, in words. Pure.

The arguments are progress records: ``step``, ``total``, ``rate``, ``seconds_ago``, ``late``, ``seconds_left``, ``metrics``.
docs/operations.md describes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .quantities import duration, rate


def short(progress: Mapping[str, Any]) -> str:
    """``step 1204 of 5000, 3.1 it/s``; if it is late, ``step 1204 of 5000 for 3m12s``."""
    where = f"step {progress['step']}"
    if progress["total"] is not None:
        where += f" of {progress['total']}"
    if progress["late"]:
        return f"{where} for {duration(progress['seconds_ago'])}"
    return where if not progress["rate"] else f"{where}, {rate(progress['rate'])}"


def long(progress: Mapping[str, Any]) -> str:
    """:func:`short`, with the time left and the metrics."""
    return ", ".join([short(progress), *_more(progress)])


def _more(progress: Mapping[str, Any]) -> list[str]:
    more = []
    if progress["seconds_left"] is not None:
        more.append(f"{duration(progress['seconds_left'])} left")
    return more + [f"{name} {metric(value)}" for name, value in progress["metrics"].items()]


def bar(progress: Mapping[str, Any], width: int) -> str:
    """One line of at most ``width`` columns: a bar if the total is known, and :func:`long`."""
    text = long(progress)
    total = progress["total"]
    if total:
        share = min(1.0, max(0.0, progress["step"] / total))
        percent = f"{int(share * 100):3d} % "
        room = min(30, width - len(percent) - len(text) - 4)
        if room >= 8:
            full, half = divmod(int(share * room * 2), 2)
            drawn = "━" * full + "╸" * half
            return f"{percent}{drawn}{'─' * (room - len(drawn))}  {text}"
        text = percent + text
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def metric(value: float | str) -> str:
    """A metric's value; numbers get four digits."""
    return value if isinstance(value, str) else f"{value:.4g}"
