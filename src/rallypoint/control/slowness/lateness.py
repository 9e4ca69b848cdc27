"""How late each rank enters the collectives of its groups, and how long it waits there for others. Pure.

A collective ends when its last member has arrived. So a slow rank waits for no one, and enters the same call later than the
others, step after step. Only ranks on one host are compared, because they share a clock.

Calls of the same operation and sizes (a *kind*) occur once or a few times per step, so the time between two of them is the
step, or a repeating part of it. Of a group's kinds, the one in which a rank is latest counts: in DDP's backward pass each
bucket is later than the one before, and the others wait only at the last one.

Steps vary by chance on every rank. So the median of many is taken, and a rank counts as late only if a rank as fast as the
others would almost never fall behind them that often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint._core.flight_records import Entered


# The fewest calls of one kind that suffice, and the most that are examined.
LEAST: Final = 25
MOST: Final = 400
# A rank must be behind the others this many standard deviations more often than a fair coin shows heads. Chance does that once
# in three million times.
SURE: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lateness:
    """A rank compared with the others on its host.

    Args:
        step: seconds from one call to the next of the same kind.
        late: how many seconds after the others it usually arrives; negative if before.
        waits: how many seconds it usually waits for the last rank.
        is_sure: whether its arriving after them is not due to chance.
    """

    step: float
    late: float
    waits: float
    is_sure: bool

    @property
    def share(self) -> float:
        """The share of a step in which the others wait for this rank."""
        return max(0.0, self.late / self.step)

    @property
    def waiting(self) -> float:
        """The share of a step in which this rank waits for others."""
        return min(1.0, max(0.0, self.waits / self.step))


def lateness(known: Mapping[int, Sequence[Entered]], seconds: float) -> dict[int, Lateness]:
    """How late each rank is.

    Args:
        known: by rank, when it entered its last collectives (:func:`rallypoint._core.flight_records.entered`). All on one host.
        seconds: how far to look back. Goes back further if there are fewer than :data:`LEAST` calls in that time.

    Returns:
        By rank, without ranks about which too little is known, or which are alone in their groups on this host.
    """
    found: dict[int, list[Lateness]] = {}
    for calls in _by_group(known).values():
        for times in _by_kind(calls, seconds):
            for rank, each in _compared(times).items():
                found.setdefault(rank, []).append(each)
    return {rank: _together(each) for rank, each in sorted(found.items())}


def _together(found: Sequence[Lateness]) -> Lateness:
    """The kind of calls in which a rank is latest, with its longest wait in any kind."""
    # A rank that is late by a whole step is not waited for: such calls run in the background.
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
    """By group, rank and number of the call: when it was entered, and its kind."""
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
    """For each kind, its calls in order, each as the times of entry by rank."""
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
        # One call more than steps, which lie between the calls.
        found.append(each[-min(max(recent, LEAST + 1), MOST) :])
    return found


def _compared(times: Sequence[Mapping[int, float]]) -> dict[int, Lateness]:
    """Compare the ranks in calls of one kind."""
    ends = [max(each.values()) for each in times]
    step = _median([after - before for before, after in itertools.pairwise(ends)])
    if step <= 0:
        return {}
    late: dict[int, list[float]] = {rank: [] for rank in times[0]}
    waits: dict[int, list[float]] = {rank: [] for rank in times[0]}
    for each, end in zip(times, ends, strict=True):
        ordered = sorted((at, rank) for rank, at in each.items())
        # With an even number of others, compare with the later of the middle two, so that no rank looks later than it is.
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
    """The median; of two middle values, the lower. (Avoids importing :mod:`statistics`.)"""
    return sorted(values)[(len(values) - 1) // 2]
