"""Commands whose stdout or stderr is full, closed or read by nobody: one line, and the exit code that it should be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


RALLY = f"{sys.executable} -m rallypoint"


def run(line: str) -> subprocess.CompletedProcess[str]:
    # Without this variable Python buffers, and what is left in a buffer is written at the end.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], env=env, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(
    "command", ["--help", "run --help", "ps", "env", "logs --help", "top --help"]
)
def test_a_full_disk_behind_stdout_is_told_in_a_line(command: str) -> None:
    done = run(f"{RALLY} {command} > /dev/full")
    told = "rally: cannot write to stdout: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


@pytest.mark.parametrize(
    "command", ["--help", "run --help", "ps", "env", "logs --help", "top --help"]
)
@pytest.mark.parametrize("to", [">&-", "2>&-", "2> /dev/full > /dev/null", "| true"])
def test_who_does_not_want_the_output_gets_no_error(command: str, to: str) -> None:
    done = run(f"{RALLY} {command} {to}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("to", ["2> /dev/full", "2>&-", "2>&1 | true"])
def test_a_mistake_that_cannot_be_told_keeps_its_exit_code(to: str) -> None:
    assert run(f"{RALLY} run no_such_file.py {to}").returncode == 2
    assert run(f"{RALLY} stacks no_such_job {to}").returncode == 1
