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

from pace import pace
from supervisors import RALLY


pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the filter knows x86-64's system calls"
)

OLD = [sys.executable, str(Path(__file__).parents[1] / "old_kernel.py")]
SCRIPT = """
import os, pathlib, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print(f"attempt {attempt}: rank {rank} of {int(total)}", flush=True)
if attempt == "0" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
while "wait" in os.environ:
    pathlib.Path(f"ready-{rank}").write_text(str(os.getpid()))
    time.sleep(0.1)
"""


def start(folder: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.Popen(
        [*OLD, RALLY, "run", "--nproc-per-node", "2", *flags, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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
