"""Time limits as users give them: which mean no limit, and which are mistakes."""

from __future__ import annotations


# Seconds (31 years). Locks, clocks and stores overflow at larger values, each at a different one.
FOREVER = 1e9


def limit_of(timeout: float, name: str = "timeout") -> float | None:
    """The limit in seconds; None (no limit) for 0, infinity and anything too large to count.

    Args:
        timeout: the user's, or a default; not negative.
        name: the argument's name, for errors.

    Raises:
        TypeError: it is not a number.
        ValueError: it is NaN or negative.
    """
    try:
        if 0 < timeout < FOREVER:
            return timeout
        means_none = timeout == 0 or timeout >= FOREVER
    except TypeError:
        raise _no_number(name, timeout) from None
    if not means_none:
        raise ValueError(f"{name} is {timeout!r}: expected seconds, 0 (no limit) or more")
    return None


def is_negative(timeout: float, name: str = "timeout") -> bool:
    """Whether a timeout is below 0, which often stands for a default.

    Raises:
        TypeError: it is not a number.
    """
    try:
        return timeout < 0
    except TypeError:
        raise _no_number(name, timeout) from None


def _no_number(name: str, timeout: object) -> TypeError:
    return TypeError(f"{name} is {timeout!r}: expected seconds as a number (0: no limit)")
