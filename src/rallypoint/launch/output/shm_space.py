"""Tell whether a worker died because ``/dev/shm`` was full.

Memory that is mapped there is only taken when it is written to. With no space left, the kernel then kills the process with SIGBUS. NCCL and
DataLoaders use it, and Docker gives a container 64 MiB.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass


FOLDER = "/dev/shm"  # noqa: S108  asked for its size
# With less space left, it is full; with less in all, it probably was.
_FULL, _LITTLE = 1 << 20, 1 << 30
_ADVICE = "docker run --shm-size=8g; in Kubernetes, a volume emptyDir of medium Memory"


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes in all, and those that are left."""

    total: int
    free: int


def read() -> Space | None:
    """The space in ``/dev/shm``; None if there is none."""
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return None
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def explain(number: int | None, space: Space | None) -> str | None:
    """A sentence if that may be why a signal killed the process, else None.

    Args:
        number: the signal.
        space: what is left a moment later. What the process had mapped may be free again.
    """
    if number != signal.SIGBUS or space is None or not space.total:
        return None
    size = f"{space.total / (1 << 20):.0f} MiB"
    if space.free < _FULL:
        return f"{FOLDER} is full; it has {size} ({_ADVICE})"
    if space.total < _LITTLE:
        return f"{FOLDER} may have been full; it has only {size} ({_ADVICE})"
    return None
