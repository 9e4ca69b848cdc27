"""Whether a process was killed because its CPU time had run out."""

from __future__ import annotations

import os
import resource
import signal

import pytest

from rallypoint._core import limits
from rallypoint.launch.output.cpu_limit import CpuTime, explain


KILL, XCPU = signal.SIGKILL, signal.SIGXCPU


@pytest.mark.parametrize(
    ("number", "time", "limit"),
    [
        (KILL, CpuTime(4.0, 4, 4), 4),
        (KILL, CpuTime(3.98, 4, 4), 4),
        (KILL, CpuTime(9.1, 5, 9), 9),
        (XCPU, CpuTime(5.0, 6, None), 5),  # the kernel has raised the soft limit by then
        (XCPU, CpuTime(5.0, 6, 9), 5),
        (KILL, CpuTime(3.0, 4, 4), None),  # somebody else killed it
        (KILL, CpuTime(7.0, 4, 9), None),
        (KILL, CpuTime(1000.0, None, None), None),
        (XCPU, CpuTime(1.0, 60, 60), None),
        (signal.SIGTERM, CpuTime(4.0, 4, 4), None),
        (None, CpuTime(4.0, 4, 4), None),
        (KILL, None, None),
    ],
)
def test_the_limit_is_named_if_it_was_reached(
    number: int | None, time: CpuTime | None, limit: int | None
) -> None:
    said = explain(number, time)
    assert said == (limit and f"it had used up its limit of {limit} s of CPU time (ulimit -t)")


@pytest.mark.parametrize("hard", [7, resource.RLIM_INFINITY])
@pytest.mark.parametrize("soft", [5, resource.RLIM_INFINITY])
def test_limits_are_read_even_from_a_zombie(soft: int, hard: int) -> None:
    if soft == resource.RLIM_INFINITY != hard:
        soft = hard
    pid = os.fork()
    if not pid:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        finally:
            os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert limits.cpu_seconds(pid) == tuple(
        None if each == resource.RLIM_INFINITY else each for each in (soft, hard)
    )
    os.waitpid(pid, 0)
    assert limits.cpu_seconds(pid) == (None, None)
