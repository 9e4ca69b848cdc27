"""Which ranks are slow: those that make the others wait, look after look. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .lateness import Lateness


# The others wait for a slow rank for at least this share of a step.
SHARE: Final = 0.1
# They also wait for at least this many seconds: shorter waits come from the order in which ranks leave the call before and wake.
LATE: Final = 0.002


@dataclass(slots=True)
class _Streak:
    since: float  # time of the first look at which it made the others wait
    last: float  # time of the last such look
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class News:
    """What has changed with a look.

    Args:
        slow: ranks that have become slow.
        over: ranks that are no longer slow.
    """

    slow: tuple[int, ...] = ()
    over: tuple[int, ...] = ()


def makes_wait(found: Lateness, contention: float = 0.0) -> bool:
    """Whether the others have to wait for a rank noticeably."""
    return found.is_sure and found.late >= LATE and found.share >= SHARE + contention


class SlowRanks:
    """The ranks of one host, look after look.

    Args:
        after: a rank becomes slow after making the others wait for this many seconds, and is no longer slow after not doing so
            for as long.
    """

    def __init__(self, after: float) -> None:
        self._after = after
        self._streaks: dict[int, _Streak] = {}
        self._last: dict[int, Lateness] = {}

    def look(self, now: float, found: Mapping[int, Lateness], contention: float = 0.0) -> News:
        """Record how late the ranks are.

        Args:
            now: seconds on a monotonic clock.
            found: by rank. A rank about which nothing is known is left out, and keeps its state.
            contention: the share of the time in which workers on this host usually wait for a CPU. If all wait, scheduling
                makes some later than others by chance.
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
        """The slow ranks, as of the last look."""
        return tuple(sorted(rank for rank, each in self._streaks.items() if each.is_named))

    @property
    def last(self) -> Mapping[int, Lateness]:
        """What was last known about each rank."""
        return self._last
