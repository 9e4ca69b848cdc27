"""How far apart the clocks of two hosts are, from when their ranks enter the same collectives. Pure.

No clock is read across hosts. But a rank enters a group's next blocking call only after the last member, on whichever host, has
entered the current one. So each pair of successive calls bounds the difference from both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rallypoint._core.flight_records import Entered


@dataclass(frozen=True, slots=True)
class Offset:
    """What to subtract from the times of one host to get those of another.

    Args:
        seconds: the middle of the possible range.
        within: how many seconds it may be off in either direction.
        calls: how many calls it is based on.
    """

    seconds: float
    within: float
    calls: int


def offset(
    first: Sequence[Sequence[Entered]], second: Sequence[Sequence[Entered]]
) -> Offset | None:
    """The offset of the second host's clock from the first host's.

    Args:
        first, second: for each rank of the host, when it entered its last collectives.

    Returns:
        None if the ranks have no blocking calls in common: calls that run in the background bound nothing.
    """
    most, least, calls = float("inf"), float("-inf"), 0
    ours, theirs = _by_group(first), _by_group(second)
    for group in ours.keys() & theirs.keys():
        here, there = ours[group], theirs[group]
        for seq in here.keys() & there.keys():
            after = seq + 1
            if after in here and after in there:
                # The earliest rank on one host enters after the latest one on the other.
                most = min(most, min(there[after]) - max(here[seq]))
                least = max(least, max(there[seq]) - min(here[after]))
                calls += 1
    if not calls or least > most:
        return None
    return Offset((most + least) / 2, (most - least) / 2, calls)


def _by_group(
    ranks: Iterable[Sequence[Entered]],
) -> dict[tuple[str, tuple[int, ...]], dict[int, list[float]]]:
    """By group and number of the call: when the ranks of a host entered it, in seconds."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, list[float]]] = {}
    for groups in ranks:
        for group in groups:
            times = found.setdefault((group["name"], tuple(group["ranks"])), {})
            _add(times, group)
    return found


def _add(times: dict[int, list[float]], group: Mapping[str, object]) -> None:
    since, seqs, offsets = group["since"], group["seqs"], group["times"]
    assert isinstance(since, int)
    assert isinstance(seqs, list)
    assert isinstance(offsets, list)
    for seq, at in zip(seqs, offsets, strict=True):
        times.setdefault(seq, []).append(since / 1e9 + at / 1e6)
