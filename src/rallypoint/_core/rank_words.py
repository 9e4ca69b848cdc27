"""Ranks in sentences. Pure."""

from __future__ import annotations

from collections.abc import Collection


def in_words(ranks: Collection[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, ``ranks 0-7, 12``."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    parts: list[str] = []
    for first, last in spans:
        few = range(first, last + 1) if last - first < 2 else ()
        parts += [str(rank) for rank in few] or [f"{first}-{last}"]
    return ("rank " if len(set(ranks)) == 1 else "ranks ") + ", ".join(parts)
