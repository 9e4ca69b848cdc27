"""Time as an argument: monotonic clocks and deadlines.

Wall clocks differ between hosts and jump, so the package never compares them. It uses them only for
times that people read (:func:`wall`, :func:`timestamp`).
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The source of time; tests pass a fake."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""


class MonotonicClock:
    """The operating system's monotonic clock, shared by all processes of this host."""

    def now(self) -> float:
        return time.monotonic()


MONOTONIC: Clock = MonotonicClock()
# The most that ``poll`` takes.
_LONGEST_POLL = 2**31 - 1


def milliseconds(seconds: float) -> int:
    """How long ``poll`` should wait; 24 days at most.

    Whole milliseconds, rounded up: the last one must not be spent spinning.
    """
    return max(0, int(min(seconds * 1000 + 1, _LONGEST_POLL)))


def milliseconds_until(at: float) -> int:
    """Like :func:`milliseconds`, until a time on :data:`MONOTONIC`."""
    return milliseconds(at - MONOTONIC.now())


class Deadline:
    """A point in time that several steps share. ``None`` means no limit.

    Args:
        timeout: seconds from now, or None.
        clock: the clock to read.
    """

    __slots__ = ("_at", "_clock")

    def __init__(self, timeout: float | None, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._at = None if timeout is None else clock.now() + timeout

    def remaining(self) -> float | None:
        """Seconds left, never negative; None without a limit."""
        return None if self._at is None else max(0.0, self._at - self._clock.now())

    def extend(self, seconds: float) -> None:
        """Move the deadline, for time that should not count."""
        if self._at is not None:
            self._at += seconds

    def expired(self) -> bool:
        return self._at is not None and self._clock.now() >= self._at


def thread_time() -> float:
    """Seconds of CPU time of the calling thread."""
    return time.thread_time()


def wall() -> float:
    """Seconds since 1970, for display and files; never compare them."""
    return time.time()


def timestamp() -> int:
    """Whole seconds since 1970."""
    return int(wall())
