"""Snapshots of sharded state: when one is taken, and to which one a loss leads back. Decisions only.

With sharded state a lost rank takes a part with it that nobody else has. So all ranks keep snapshots of their parts, and a loss
takes all of them back to the same one.

- All ranks take the same snapshots, and number them alike. After each one they wait for each other, so a rank starts the next one
  only when this one is complete everywhere. With two slots per rank, there is always one complete snapshot on all of them.
- A loss leads back to the newest snapshot that is complete on every rank. Newer ones are dropped: what follows may differ.
- The number of steps between two is either given, or follows from figures that all ranks share while they wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


# The share of the training time that snapshots may take, by their own count, if the user does not set an interval. A session
# promises to cost 2 % in all; with a share of 2 %, steps were 2.7 % longer (bench/session_steps.py).
SHARE = 0.0125


@dataclass(frozen=True, order=True, slots=True)
class Held:
    """A complete snapshot on a rank.

    Args:
        number: counts snapshots, the same on all ranks.
        steps: how many steps were complete.
    """

    number: int
    steps: int


def common(held: Sequence[Sequence[Held]]) -> Held | None:
    """The newest snapshot that all ranks have; None if there is none.

    Args:
        held: each rank's snapshots.
    """
    everywhere = set(held[0]).intersection(*held[1:]) if held else set()
    return max(everywhere, default=None)


class Schedule:
    """When the next snapshot is due. The same on all ranks, as all of them pass it the same figures.

    Args:
        every: steps between two snapshots; None: as often as :data:`SHARE` of the time allows.

    Raises:
        ValueError: ``every`` is below 1.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None and every < 1:
            raise ValueError(f"elastic.session: snapshot_every is {every}, expected at least 1")
        self._every = every
        self._last = 0
        self._interval = every or 1

    @property
    def interval(self) -> int:
        """Steps between the last snapshot and the next."""
        return self._interval

    def is_due(self, steps: int) -> bool:
        """Whether a snapshot is due after this many steps."""
        return steps - self._last >= self._interval

    def restart(self, steps: int) -> None:
        """All ranks are back at a snapshot: one of them remembers nothing, so all start over."""
        self._last, self._interval = steps, self._every or 1

    def note(self, steps: int, cost: float, step: float) -> None:
        """A snapshot is complete on all ranks.

        Args:
            steps: how many were complete.
            cost: seconds that it took the slowest rank.
            step: seconds of one step since the last snapshot, on the fastest rank; 0 if not known.
        """
        if self._every is None and steps > self._last and step > 0.0:
            wanted = math.ceil(cost / (SHARE * step))
            # The first figures are not typical: memory is touched for the first time, and kernels are loaded.
            self._interval = max(1, min(wanted, 2 * self._interval))
        self._last = steps
