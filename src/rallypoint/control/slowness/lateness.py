"""How late each rank comes to the collectives of its groups, and how long it waits there for others. Pure.

A collective ends when its last member has come. So a slow rank waits for nobody, and enters the same call later than the others do, in
step after step. Only ranks of one host are compared: they share a clock.

Calls of the same operation and sizes (a *kind*) come once or a few times in a step, so the time between two of them is the step, or a
part of it that repeats. Of the kinds of a group, the one counts to which a rank comes latest: in the backward pass of DDP each bucket
is later than the one before, and only at the last one the others stand still.

Steps differ by chance, on every rank. So the median of many steps is taken, and it must be all but impossible that a rank which is as fast
as the others is behind them in so many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint._core.flight_records import Entered


# Calls of one kind that are needed at least, and the most that are looked at.
LEAST: Final = 25
MOST: Final = 400
# How many standard deviations of a fair coin's count "behind the others" must be more often than "before them". Chance does that
# once in three million times.
SURE: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lateness:
    """A rank among the others of its host.

    Args:
        step: seconds from one call to the next of the same kind.
        late: seconds by which it comes after the others, usually; negative if before.
        waits: seconds that it waits for the last one, usually.
        is_sure: it is not by chance that it comes after them.
    """

    step: float
    late: float
    waits: float
    is_sure: bool

    @property
    def share(self) -> float:
        """The part of a step that the others wait for this rank."""
        return max(0.0, self.late / self.step)

    @property
    def waiting(self) -> float:
        """The part of a step that this rank waits for others."""
        return min(1.0, max(0.0, self.waits / self.step))


def lateness(known: Mapping[int, Sequence[Entered]], seconds: float) -> dict[int, Lateness]:
    """How late each rank is.

    Args:
        known: by rank, when it entered its last collectives (:func:`rallypoint._core.flight_records.entered`). All of one host.
        seconds: how far to look back, if there are :data:`LEAST` calls in that time; otherwise so far that there are.

    Returns:
        By rank. Without those of whom too little is known, or who are alone in their groups on this host.
    """
    found: dict[int, list[Lateness]] = {}
    for calls in _by_group(known).values():
        for times in _by_kind(calls, seconds):
            for rank, each in _compared(times).items():
                found.setdefault(rank, []).append(each)
    return {rank: _together(each) for rank, each in sorted(found.items())}


def _together(found: Sequence[Lateness]) -> Lateness:
    """The kind of calls in which a rank is latest, with the longest wait of any."""
    # What others do not wait for, they have left behind before it came: calls that run in the background.
    blocking = [each for each in found if each.late < each.step] or found
    latest = max(blocking, key=lambda each: (each.is_sure, each.share))
    waiting = max(blocking, key=lambda each: each.waiting).waiting
    return Lateness(
        step=latest.step,
        late=latest.late,
        waits=waiting * latest.step,
        is_sure=latest.is_sure and latest.late < latest.step,
    )


def _by_group(
    known: Mapping[int, Sequence[Entered]],
) -> dict[tuple[str, tuple[int, ...]], dict[int, dict[int, tuple[float, int]]]]:
    """By group: by rank, by number of the call: when it was entered, and its kind."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, tuple[float, int]]]] = {}
    first = min((group["since"] for groups in known.values() for group in groups), default=0)
    for rank, groups in known.items():
        for group in groups:
            begin = (group["since"] - first) / 1e9
            calls = {
                seq: (begin + at / 1e6, kind)
                for seq, at, kind in zip(group["seqs"], group["times"], group["kinds"], strict=True)
            }
            found.setdefault((group["name"], tuple(group["ranks"])), {})[rank] = calls
    return {group: calls for group, calls in found.items() if len(calls) > 1}


def _by_kind(
    calls: Mapping[int, Mapping[int, tuple[float, int]]], seconds: float
) -> list[list[dict[int, float]]]:
    """For each kind of calls, call after call: by rank, when it was entered."""
    common = set.intersection(*(set(each) for each in calls.values()))
    kinds: dict[int, list[dict[int, float]]] = {}
    for seq in sorted(common):
        of_ranks = {rank: each[seq] for rank, each in calls.items()}
        same = {kind for _, kind in of_ranks.values()}
        if len(same) == 1:
            times = {rank: at for rank, (at, _) in of_ranks.items()}
            kinds.setdefault(same.pop(), []).append(times)
    found = []
    for each in kinds.values():
        if len(each) <= LEAST:
            continue
        oldest = max(each[-1].values()) - seconds
        recent = sum(max(times.values()) >= oldest for times in each)
        # One more: the steps are between them.
        found.append(each[-min(max(recent, LEAST + 1), MOST) :])
    return found


def _compared(times: Sequence[Mapping[int, float]]) -> dict[int, Lateness]:
    """The ranks in calls of one kind."""
    ends = [max(each.values()) for each in times]
    step = _median([after - before for before, after in itertools.pairwise(ends)])
    if step <= 0:
        return {}
    late: dict[int, list[float]] = {rank: [] for rank in times[0]}
    waits: dict[int, list[float]] = {rank: [] for rank in times[0]}
    for each, end in zip(times, ends, strict=True):
        ordered = sorted((at, rank) for rank, at in each.items())
        # Of an even number of others, the later one of the two in the middle: it is not to look worse than it is.
        middle = (len(ordered) - 1) // 2
        for place, (at, rank) in enumerate(ordered):
            others = ordered[middle if middle < place else middle + 1][0]
            late[rank].append(at - others)
            waits[rank].append(end - at)
    count = len(times)
    enough = count / 2 + SURE * math.sqrt(count) / 2
    return {
        rank: Lateness(
            step=step,
            late=_median(late[rank]),
            waits=_median(waits[rank]),
            is_sure=sum(value > 0 for value in late[rank]) >= enough,
        )
        for rank in late
    }


def _median(values: Sequence[float]) -> float:
    """The lower one of two. (:mod:`statistics` would have to be imported.)"""
    return sorted(values)[(len(values) - 1) // 2]
