"""A clock that stands still, or is slow, until it is set."""

from __future__ import annotations

import time


class ManualClock:
    """Goes on when it is told to, so that a test of time limits need not wait for them.

    Args:
        start: what it shows at first, in seconds.
        rate: seconds that pass on it in each real second. 0: it stands still.
    """

    def __init__(self, start: float = 0.0, rate: float = 0.0) -> None:
        self._now = start
        self._rate = rate
        self._began = time.monotonic()

    def now(self) -> float:
        """What it shows.

        Returns:
            Seconds.
        """
        return self._now + self._rate * (time.monotonic() - self._began)

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Args:
            seconds: how much; not negative.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds is {seconds:g}: this clock does not go back")
        self._now += seconds
