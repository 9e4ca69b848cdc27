"""Threads for what may be left out: a look at a job must not end it because no thread or descriptor is left."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping


def begin(work: Callable[[], None], name: str) -> bool:
    """Run something in a daemon thread. Returns whether there was one left."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


def duplicates(fds: Mapping[int, int]) -> dict[int, int] | None:
    """Copies of descriptors, by the same keys; None if there is none left. :func:`close` them."""
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
