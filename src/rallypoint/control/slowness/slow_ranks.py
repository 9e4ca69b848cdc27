"""Which ranks are slow: they make the others wait, look after look. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .lateness import Lateness


# The part of a step that the others wait for a rank that is slow.
SHARE: Final = 0.1
# Seconds that they wait in each step. Less is due to the order in which ranks leave the call before, and the system wakes them.
LATE: Final = 0.002


@dataclass(slots=True)
class _Streak:
    since: float  # of the first look at which it made the others wait
    last: float  # of the last such look
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class News:
    """What a look has changed.

    Args:
        slow: ranks that are slow from now on.
        over: ranks that are no longer.
    """

    slow: tuple[int, ...] = ()
    over: tuple[int, ...] = ()


def makes_wait(found: Lateness, contention: float = 0.0) -> bool:
    """Whether the others wait for a rank by more than a little."""
    return found.is_sure and found.late >= LATE and found.share >= SHARE + contention


class SlowRanks:
    """The ranks of one host, look after look.

    Args:
        after: seconds for which a rank must make the others wait before it is slow, and for which it must not before it is no
            longer.
    """

    def __init__(self, after: float) -> None:
        self._after = after
        self._streaks: dict[int, _Streak] = {}
        self._last: dict[int, Lateness] = {}

    def look(self, now: float, found: Mapping[int, Lateness], contention: float = 0.0) -> News:
        """Take note of how late the ranks are.

        Args:
            now: seconds on a monotonic clock.
            found: by rank. One of whom nothing is known is left out: that says nothing about it.
            contention: the part of the time in which the workers of this host usually wait for a CPU. If all do, some are later
                than others by chance of scheduling.
        """
        self._last = {**self._last, **found}
        for rank, each in found.items():
            if makes_wait(each, contention):
                streak = self._streaks.setdefault(rank, _Streak(now, now))
                streak.last = now
            elif rank in self._streaks and not self._streaks[rank].is_named:
                del self._streaks[rank]
        slow, over = [], []
        for rank, streak in sorted(self._streaks.items()):
            if not streak.is_named and streak.last - streak.since >= self._after:
                streak.is_named = True
                slow.append(rank)
            elif streak.is_named and rank in found and now - streak.last >= self._after:
                over.append(rank)
        for rank in over:
            del self._streaks[rank]
        return News(tuple(slow), tuple(over))

    @property
    def slow(self) -> tuple[int, ...]:
        """The ranks that are slow, as of the last look."""
        return tuple(sorted(rank for rank, each in self._streaks.items() if each.is_named))

    @property
    def last(self) -> Mapping[int, Lateness]:
        """What was known of each rank last."""
        return self._last
