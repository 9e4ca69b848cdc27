"""Jobs on a kernel as old as the oldest that torch's wheels run on (RHEL 8 has 4.18), and in containers that refuse new system calls."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import supervisors
from pace import pace
from supervisors import RALLY


pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the filter knows x86-64's system calls"
)

TESTS = Path(__file__).parents[1]
OLD = [sys.executable, str(TESTS / "old_kernel.py")]
# The same for a process with all imports, which has not asked the kernel for anything yet.
FORKED = f"""
import runpy, sys
sys.path.append({str(TESTS)!r})
from old_kernel import refuse_new_calls
refuse_new_calls()
from rallypoint._core import linux
assert not linux.has_pidfds()  # it keeps the answer
runpy.run_module("rallypoint", run_name="__main__", alter_sys=True)
"""
SCRIPT = """
import os, pathlib, signal, time
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if attempt == "0":  # which ends before anything is imported
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
import atexit, gc
gc.set_threshold(1_000_000)  # or a fifth of the time that torch's import takes is collections
atexit.register(gc.freeze)  # or an interpreter that ends looks through all of torch for cycles
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"attempt {attempt}: rank {rank} of {int(total)}", flush=True)
while "wait" in os.environ:
    pathlib.Path(f"ready-{rank}").write_text(str(os.getpid()))
    time.sleep(0.1)
"""


def start(folder: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    cold = "exec" in flags
    program = [*OLD, RALLY] if cold else [sys.executable, "-c", FORKED]
    return supervisors.Popen(
        [*program, "run", "--nproc-per-node", "2", *flags, "train.py"],
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        forked=not cold,
    )


def test_the_filter_refuses_what_is_newer_than_4_18() -> None:
    code = "import os; os.pidfd_open(os.getpid())"
    done = subprocess.run([*OLD, sys.executable, "-c", code], capture_output=True, text=True)
    assert "Function not implemented" in done.stderr


@pytest.mark.parametrize("flags", [(), ("--start-method", "exec")], ids=["fork server", "exec"])
def test_a_killed_worker_costs_one_attempt(flags: tuple[str, ...], tmp_path: Path) -> None:
    job = start(tmp_path, *flags, "--max-restarts", "1")
    said, _ = job.communicate(timeout=60 * pace())
    assert job.returncode == 0, said
    assert "rank 1 was killed by SIGKILL; restarting all workers (attempt 2 of 2)" in said
    assert said.count("attempt 1: rank") == 2


@pytest.mark.parametrize("victim", ["supervisor", "fork server"])
def test_nothing_is_left_when_one_of_them_is_killed(victim: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--max-restarts", "1", wait="1")
    pids = [tmp_path / f"ready-{rank}" for rank in (0, 1)]
    until = time.monotonic() + 60 * pace()
    while not all(each.exists() and each.read_text() for each in pids):
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.02)
    workers = [psutil.Process(int(each.read_text())) for each in pids]
    server = workers[0].parent()
    assert server is not None and server.ppid() == job.pid
    family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    os.kill(job.pid if victim == "supervisor" else server.pid, signal.SIGKILL)
    said, _ = job.communicate(timeout=60 * pace())
    assert not psutil.wait_procs(family, timeout=30 * pace())[1]
    if victim == "supervisor":
        assert job.returncode == -signal.SIGKILL
    else:
        assert job.returncode == 1 and "was killed by SIGKILL" in said, said
