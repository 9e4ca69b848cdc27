"""Descriptions of slow ranks for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.control.tables.quantities import duration

from .lateness import Lateness


def is_slow(rank: int, found: Lateness, place: str, differences: Sequence[str]) -> str:
    """A line about a rank that is slow.

    Args:
        rank: the slow rank.
        found: how late it is.
        place: where its main thread is most often, in words; empty if unknown.
        differences: how it differs from the others, in words.
    """
    text = (
        f"rank {rank} is slow: the others wait for it {found.share:.0%} of the time"
        f" ({seconds(found.late)} of each {seconds(found.step)})"
    )
    parts = [text, *([f"it is most often at {place}"] if place else []), *differences]
    return "; ".join(parts)


def was_slow(rank: int, share: float, passed: float) -> str:
    """The same after the job has ended.

    Args:
        rank: the rank that was slow.
        share: the share of the time in which the others waited for it.
        passed: how many seconds it was slow.
    """
    return f"rank {rank} was slow for {duration(passed)}: the others waited for it {share:.0%} of that time"


def seconds(value: float) -> str:
    """``0.42 s``, ``3.1 ms``."""
    if value >= 1:
        return f"{value:.1f} s"
    if value >= 0.1:
        return f"{value:.2f} s"
    return f"{value * 1000:.3g} ms"
