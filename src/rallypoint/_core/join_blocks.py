"""The Join blocks that are open in this process: for sessions, which know nothing of Join."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


_open = 0


@contextmanager
def opened() -> Iterator[None]:
    """Count a block as open until the context ends."""
    global _open  # noqa: PLW0603  one process has one script
    _open += 1
    try:
        yield
    finally:
        _open -= 1


def is_open() -> bool:
    return _open > 0
