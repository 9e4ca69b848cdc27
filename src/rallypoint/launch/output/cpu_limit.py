"""Detect that a worker was killed because it had used up its CPU time (``RLIMIT_CPU``, ``ulimit -t``).

At the soft limit the kernel sends SIGXCPU, and at the hard one SIGKILL. Where both are the same, as shells and batch systems
set them, that is a SIGKILL like any other.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass


# The kernel counts whole seconds.
_SLACK = 0.5


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of CPU time of a process that was killed.

    Args:
        used: what it used.
        soft: its soft limit; None: it had none.
        hard: its hard limit; None: it had none.
    """

    used: float
    soft: int | None
    hard: int | None


def explain(number: int | None, time: CpuTime | None) -> str | None:
    """A sentence if the process died of its limit, else None.

    Args:
        number: the signal that killed it, if one did.
        time: its CPU time, if known.
    """
    limit = None
    if time is not None and number == signal.SIGKILL:
        limit = time.hard
    elif time is not None and number == signal.SIGXCPU and time.soft is not None:
        limit = time.soft - 1  # the kernel raises it with each signal that it sends
    if time is None or limit is None or time.used < limit - _SLACK:
        return None
    return f"it had used up its limit of {limit} s of CPU time (ulimit -t)"
