"""The socket between this worker and its supervisor, for parts that talk over it: JSON records, one per line."""

from __future__ import annotations

import os


_held: tuple[int, int] | None = None


def hold(fd: int) -> None:
    """In a worker, at its start: this descriptor leads to its supervisor."""
    global _held  # noqa: PLW0603  one process has one supervisor
    _held = os.getpid(), fd


def held() -> int | None:
    """The descriptor; None in a process that is no worker, also in a worker's child."""
    if _held is None or _held[0] != os.getpid():
        return None
    return _held[1]
