"""The lock of workers' lines."""

from __future__ import annotations

import os

from rallypoint.control.line_lock import LINES


def test_a_fork_of_one_who_asks_may_ask() -> None:
    with LINES:
        assert not LINES.acquire(timeout=0.0)
        child = os.fork()
        if not child:
            os._exit(0 if LINES.acquire(timeout=0.0) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert LINES.acquire(timeout=0.0)
    LINES.release()
