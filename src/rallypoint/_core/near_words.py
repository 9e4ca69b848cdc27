"""The word that somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like this one, or None if none is.

    Args:
        cutoff: how alike they must be, from 0 to 1.
    """
    import difflib  # a supervisor need not keep it in memory

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)
