"""A clock that stands still, or runs at a given rate, until it is advanced."""

from __future__ import annotations

import time


class ManualClock:
    """Advances when told to, so that a test of time limits need not wait for them.

    Args:
        start: the time it shows at first, in seconds.
        rate: seconds that pass on it per real second. 0: it stands still.
    """

    def __init__(self, start: float = 0.0, rate: float = 0.0) -> None:
        self._now = start
        self._rate = rate
        self._began = time.monotonic()

    def now(self) -> float:
        """The time it shows.

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
