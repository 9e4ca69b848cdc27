"""Time limits as users give them: which mean no limit, and which are mistakes."""

from __future__ import annotations


# Seconds (31 years). Locks, clocks and stores overflow at more, each at another number.
FOREVER = 1e9


def limit_of(timeout: float, name: str = "timeout") -> float | None:
    """The limit in seconds; None: no limit, which 0, infinity and anything too large to count mean.

    Args:
        timeout: the user's, or a default; not negative.
        name: of the argument, for errors.

    Raises:
        TypeError: it is not a number.
        ValueError: it is NaN or negative.
    """
    try:
        if 0 < timeout < FOREVER:
            return timeout
        means_none = timeout == 0 or timeout >= FOREVER
    except TypeError:
        raise TypeError(
            f"{name} is {timeout!r}: expected seconds as a number (0: no limit)"
        ) from None
    if not means_none:
        raise ValueError(f"{name} is {timeout!r}: expected seconds, 0 (no limit) or more")
    return None
