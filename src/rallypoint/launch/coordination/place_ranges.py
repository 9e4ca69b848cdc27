"""The places in a journal that one node has withdrawn, as ranges. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final


# The oldest ranges are forgotten: a reader that is still there fills the holes.
MAX_RANGES: Final = 256


class PlaceRanges:
    """A growing set of places.

    Args:
        ranges: first and last place of each range, in order.
    """

    def __init__(self, ranges: list[tuple[int, int]] | None = None) -> None:
        self._ranges = ranges or []

    def add(self, place: int) -> None:
        """Add a place. Places may come in any order, except those that are forgotten."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self._ranges, (place, place)]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self._ranges = merged[-MAX_RANGES:]

    def end_of(self, place: int) -> int | None:
        """The first place after the range that ``place`` is in; None: it is in none."""
        for first, last in self._ranges:
            if first <= place <= last:
                return last + 1
        return None

    def to_json(self) -> dict[str, Any]:
        return {"ranges": [list(each) for each in self._ranges]}

    @classmethod
    def from_json(cls, body: Mapping[str, Any] | None) -> PlaceRanges:
        """The ranges in another node's record; anything in it that is not a range is left out."""
        told = (body or {}).get("ranges")
        ranges = told if isinstance(told, list) else []
        return cls(
            [
                (each[0], each[1])
                for each in ranges
                if isinstance(each, list)
                and len(each) == 2
                and all(type(end) is int for end in each)
                and 0 <= each[0] <= each[1]
            ]
        )
