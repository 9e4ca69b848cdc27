"""Where a slow rank is while the others wait for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def own_place(seen: Mapping[str, int], others: Sequence[Mapping[str, int]]) -> str:
    """The place where a rank is seen most often relative to the others.

    All ranks do much of the same work. A rank is late because of what only it does, or does for longer.

    Args:
        seen: by place, how often the rank was seen there.
        others: the same for each other rank, at the same moments.

    Returns:
        The place; empty if it was not seen anywhere.
    """

    def excess(place: str) -> float:
        usual = sum(each.get(place, 0) for each in others) / len(others) if others else 0.0
        return seen[place] - usual

    return max(seen, key=excess, default="")
