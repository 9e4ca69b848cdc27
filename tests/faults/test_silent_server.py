"""A fork server that does not answer: stopped by somebody, or stuck in the kernel. The job ends nevertheless."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import supervisors
from rallypoint._core import process


pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

FREEZER = Path("/sys/fs/cgroup/freezer")
SAVES = ("--no-torch", "--saves")
FUNCTION = """
import sys
from rallypoint.launch import MultiprocessConfig, launch_subprocesses

def work():
    import time
    print("ready", flush=True)
    time.sleep(600)

launch_subprocesses(work, MultiprocessConfig(world_size=2, launch_method=sys.argv[1]))
"""


@pytest.mark.parametrize("times", [1, 2])
def test_a_stopped_server_is_woken_and_workers_save(start, times):
    job = start("--nproc-per-node", "2", worker=SAVES)
    job.workers(2)
    job.kill(job.server(), signal.SIGSTOP)
    for _ in range(times):
        job.kill(job.supervisor, signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert times == 2 or len(job.notes("saved.*")) == 2
    assert not job.alive()
    assert "stopped by SIGTERM; all workers have ended" in job.stderr()


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_stopped_server_of_a_function_launch_is_woken(tmp_path, method):
    script = tmp_path / "program.py"
    script.write_text(FUNCTION)
    with supervisors.Popen(
        [sys.executable, str(script), method], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        try:
            assert program.stdout is not None
            assert [program.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
            (server,) = process.children(program.pid)
            below = process.descendants(program.pid)
            os.kill(server, signal.SIGSTOP)
            os.kill(program.pid, signal.SIGTERM)
            assert program.wait(60) == -signal.SIGTERM
            assert not any(map(process.is_running, below))
        finally:
            process.send(process.descendants(program.pid), signal.SIGKILL)
            program.kill()


@pytest.fixture
def freeze() -> Iterator:
    """``freeze(pid)`` makes a process deaf to everything, even SIGKILL, as a hung driver does."""
    if not (FREEZER / "tasks").exists() or os.geteuid() != 0:
        pytest.skip("needs root and the freezer of cgroup v1")
    folder = FREEZER / f"rally-{uuid.uuid4().hex[:8]}"
    folder.mkdir()

    def freeze_it(pid: int) -> None:
        (folder / "cgroup.procs").write_text(str(pid))
        (folder / "freezer.state").write_text("FROZEN")

    try:
        yield freeze_it
    finally:
        (folder / "freezer.state").write_text("THAWED")
        for pid in map(int, (folder / "cgroup.procs").read_text().split()):
            os.kill(pid, signal.SIGKILL)
            process.reap([pid], 20)
        try:
            folder.rmdir()
        except OSError:  # the kernel has not released the last one yet
            pass


@pytest.mark.parametrize("times", [1, 2])
def test_a_server_that_hangs_in_the_kernel_is_left_behind_alone(start, freeze, times):
    job = start("--nproc-per-node", "2", "--shutdown-timeout", "6", worker=SAVES)
    pids = job.workers(2)
    server = job.server()
    freeze(server)
    for _ in range(times):
        job.kill(job.supervisor, signal.SIGTERM)
    assert job.end(60) == 128 + signal.SIGTERM
    assert not any(map(process.is_running, pids))
    assert list(job.alive()) == [server]
    said = job.stderr()
    assert f"the fork server (pid {server}) does not answer" in said
    assert f"processes [{server}] survived SIGKILL" in said
    if times == 1:
        assert len(job.notes("saved.*")) == 2, "they have had their grace"
    assert "Traceback" not in said


@pytest.mark.long
def test_an_end_that_a_hanging_server_does_not_report_fails_the_job(start, freeze):
    job = start("--nproc-per-node", "2", worker=SAVES)
    pids = job.workers(2)
    freeze(job.server())
    job.kill(pids[0])
    assert job.end(90) == 1
    assert "fork server" in job.stderr().split("rally: the job failed")[1]
