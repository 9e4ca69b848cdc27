"""Where a slow rank is while the others wait for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def own_place(seen: Mapping[str, int], others: Sequence[Mapping[str, int]]) -> str:
    """The place where a rank is most often, beyond what the others are there.

    All ranks do much of the same work. What only one does, or does for longer, is why it is late.

    Args:
        seen: by place, how often the rank was seen there.
        others: the same of each other rank, at the same moments.

    Returns:
        The place; empty if it was not seen anywhere.
    """

    def excess(place: str) -> float:
        usual = sum(each.get(place, 0) for each in others) / len(others) if others else 0.0
        return seen[place] - usual

    return max(seen, key=excess, default="")
