"""Whether a thread busy-waits for a moment before it sleeps until something arrives.

Waking a sleeping core takes as long as a short call. So if the last wait was short, the next one starts as a busy-wait. If
nothing arrived during it, the other end needs the core more than this one, or has more work to do. Then a growing number
of waits do without.
"""

from __future__ import annotations

import os


# Seconds: the length of a busy-wait, and of a wait that counts as short, including the time that a core takes to wake.
SPIN, SHORT = 500e-6, 1e-3
# Seconds that one look takes at most, unless another thread needs the interpreter or the core. Then the busy-wait ends.
LOOK = 100e-6
_CAN = len(os.sched_getaffinity(0)) > 1
# After failures: the most waits in a row without a busy-wait.
_MOST_SKIPPED = 255


class BusyWait:
    """For one thread at a time, which waits for one thing. Pure except for the number of cores.

    Args:
        possible: False on a single core, which the other end needs; None: decided by the cores that this process has.
    """

    __slots__ = ("_is_short", "_penalty", "_possible", "_skipped")

    def __init__(self, possible: bool | None = None) -> None:
        self._possible = _CAN if possible is None else possible
        self._is_short = False
        self._penalty = 0
        self._skipped = 0

    def is_worth_it(self) -> bool:
        """Whether to busy-wait; asked before each wait."""
        if not self._is_short:
            return False
        if self._skipped:
            self._skipped -= 1
            return False
        return True

    def tried(self, came: bool) -> None:
        """Note whether something arrived during the busy-wait."""
        if came:
            self._penalty >>= 1
        else:
            self._penalty = self._skipped = min(2 * self._penalty + 1, _MOST_SKIPPED)

    def slept(self, seconds: float) -> None:
        """Note how long a sleeping wait took until something arrived."""
        self._is_short = self._possible and seconds < SHORT
