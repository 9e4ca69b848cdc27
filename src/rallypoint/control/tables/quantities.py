"""Times and rates for people. Pure."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``42s``, ``12m03s``, ``3h07m``, ``2d04h``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def rate(per_second: float) -> str:
    """``3.14 it/s``, or ``4.20 s/it`` if a step takes more than a second."""
    if per_second >= 1:
        return f"{digits(per_second)} it/s"
    return f"{digits(1 / per_second)} s/it" if per_second > 0 else "0 it/s"


def digits(value: float) -> str:
    """Three digits: ``3.14``, ``31.4``, ``314``."""
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f}"
