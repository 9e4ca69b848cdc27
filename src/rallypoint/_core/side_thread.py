"""Threads for work that may be skipped: looking at a job must not end it because no thread or descriptor is left."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping


def begin(work: Callable[[], None], name: str) -> bool:
    """Run something in a daemon thread. Returns whether a thread could be started."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


def duplicates(fds: Mapping[int, int]) -> dict[int, int] | None:
    """Copies of descriptors, by the same keys, to be closed with :func:`close`; None if no descriptor is left."""
    found: dict[int, int] = {}
    try:
        for key, fd in fds.items():
            found[key] = os.dup(fd)
    except OSError:
        close(found)
        return None
    return found


def close(fds: Mapping[int, int]) -> None:
    for fd in fds.values():
        with contextlib.suppress(OSError):
            os.close(fd)
