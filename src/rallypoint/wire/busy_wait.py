"""Whether to ask again and again for a moment, before a thread sleeps until something comes.

A core that falls asleep takes as long to wake as a short call takes. So where the last wait was short, the next one is
begun awake. Where that was in vain, the other end needs the core more than we do, or has more to do: then it is not tried
again for ever more waits.
"""

from __future__ import annotations

import os


# Seconds: of staying awake, and of a wait that counts as short.
SPIN, SHORT = 250e-6, 400e-6
_CAN = len(os.sched_getaffinity(0)) > 1
# After failures, waits without a try.
_MOST_SKIPPED = 255


class BusyWait:
    """For one thread at a time that waits for one thing. Pure but for the number of cores.

    Args:
        possible: not on a single core, which the other end needs; None: as this process has them.
    """

    __slots__ = ("_is_short", "_penalty", "_possible", "_skipped")

    def __init__(self, possible: bool | None = None) -> None:
        self._possible = _CAN if possible is None else possible
        self._is_short = False
        self._penalty = 0
        self._skipped = 0

    def is_worth_it(self) -> bool:
        """Asked before each wait."""
        if not self._is_short:
            return False
        if self._skipped:
            self._skipped -= 1
            return False
        return True

    def tried(self, came: bool) -> None:
        """Whether something came while we stayed awake."""
        if came:
            self._penalty >>= 1
        else:
            self._penalty = self._skipped = min(2 * self._penalty + 1, _MOST_SKIPPED)

    def slept(self, seconds: float) -> None:
        """How long it took until something came, in a wait that slept."""
        self._is_short = self._possible and seconds < SHORT
