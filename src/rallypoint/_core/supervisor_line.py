"""The socket between this worker and its supervisor, for parts that talk over it: JSON records, one per line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


# Of this process: its id, the descriptor, and the socket's identity.
_held: tuple[int, int, tuple[int, int]] | None = None
# Functions to call in forks of this process that become workers.
_awaited: list[Callable[[], None]] = []


def hold(fd: int) -> None:
    """In a worker, at its start: this descriptor leads to its supervisor."""
    global _held  # noqa: PLW0603  one process has one supervisor
    _held = os.getpid(), fd, _identity(fd)
    for function in _awaited:
        function()


def when_held(function: Callable[[], None]) -> None:
    """Call this now if this process is a worker, and in each fork of it that becomes one, before any other code of its script."""
    _awaited.append(function)
    if held() is not None:
        function()


@contextmanager
def nothing_awaited() -> Iterator[None]:
    """Forget what this block asks for: modules imported in it run again in the workers that import them, and ask again."""
    before = list(_awaited)
    try:
        yield
    finally:
        _awaited[:] = before


def held() -> int | None:
    """The descriptor; None in a process that is not a worker, including a worker's child."""
    if _held is None or _held[0] != os.getpid():
        return None
    return _held[1]


def leads_there(fd: int) -> bool:
    """Whether a descriptor is still the one that was held: a script that closes all may open another one under its number."""
    try:
        return _held is not None and _identity(fd) == _held[2]
    except OSError:
        return False


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
