"""Ranks in sentences. Pure."""

from __future__ import annotations

from collections.abc import Collection


def in_words(ranks: Collection[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, ``ranks 0-7, 12``."""
    return ("rank " if len(set(ranks)) == 1 else "ranks ") + numbers_in_words(ranks)


def numbers_in_words(numbers: Collection[int]) -> str:
    """``3``, ``0, 1``, ``0-7, 12``."""
    spans: list[tuple[int, int]] = []
    for each in sorted(set(numbers)):
        if spans and spans[-1][1] == each - 1:
            spans[-1] = spans[-1][0], each
        else:
            spans.append((each, each))
    parts: list[str] = []
    for first, last in spans:
        few = range(first, last + 1) if last - first < 2 else ()
        parts += [str(each) for each in few] or [f"{first}-{last}"]
    return ", ".join(parts)
