"""How the kernel schedules the threads that a library starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


_USUAL = os.sched_param(0)


@contextlib.contextmanager
def batch_threads() -> Iterator[None]:
    """Threads that the calling one starts in this block do not interrupt others when they wake up (``SCHED_BATCH``, sched(7)).

    Gloo's thread, once awake, tries the lock of a connection until it gets it. If it has interrupted the very thread that holds
    the lock, it does so for a whole time slice.

    The calling thread is scheduled as before afterwards. Does nothing if somebody has chosen a policy, or the kernel refuses.
    """
    is_set = _set(os.SCHED_BATCH, instead_of=os.SCHED_OTHER)
    try:
        yield
    finally:
        if is_set:
            _set(os.SCHED_OTHER, instead_of=os.SCHED_BATCH)


def _set(policy: int, *, instead_of: int) -> bool:
    try:
        if os.sched_getscheduler(0) != instead_of:
            return False
        os.sched_setscheduler(0, policy, _USUAL)
    except OSError:
        return False
    return True
