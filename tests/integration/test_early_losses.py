"""A worker lost as soon as its session trains: its supervisor may not know yet that the other nodes' workers are in theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic import wait_until
from ports import free_port
from supervisors import Popen


pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SCRIPT = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
from rallypoint import elastic
from rallypoint.elastic.worker.link import Link

folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
enter = Link.enter

def noted(*args, **kwargs):
    found = enter(*args, **kwargs)
    (folder / f"entered {rank}").touch()
    return found

Link.enter = noted
while rank == 1 and not (folder / "go on").exists():
    time.sleep(0.02)
with elastic.session(net, optimizer) as session:
    rank = dist.get_rank()
    while session.position < 2000 and not (folder / "stop").exists():
        with session.step():
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (folder / f"new {rank}").write_text(f"{session.position} {os.getpid()}")
        os.replace(folder / f"new {rank}", folder / f"at {rank}")
        time.sleep(0.02)
os._exit(0)
"""


def test_a_worker_is_lost_before_its_supervisor_has_heard_of_the_other_session(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    flags += ["--insecure", "--rdzv-conf", "lease=100"]
    words = [sys.executable, "-m", "rallypoint", "run", *flags]

    def start(rank: int) -> subprocess.Popen[str]:
        place = ["--node-rank", str(rank), str(tmp_path / "train.py"), str(tmp_path)]
        return Popen([*words, *place], cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def progress() -> list[tuple[int, int]] | None:
        paths = [tmp_path / f"at {rank}" for rank in range(2)]
        if not all(path.exists() for path in paths):
            return None
        found = []
        for path in paths:
            step, pid = path.read_text().split()
            found.append((int(step), int(pid)))
        return found

    nodes = [start(rank) for rank in range(2)]
    try:
        wait_until((tmp_path / "entered 0").exists, "rank 0 is in the session")
        nodes[0].send_signal(signal.SIGSTOP)
        (tmp_path / "go on").touch()
        before = wait_until(progress, "both train")
        os.kill(before[0][1], signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{before[0][1]}").exists(), "it has been reaped")
        nodes[0].send_signal(signal.SIGCONT)

        def again() -> list[tuple[int, int]] | None:
            assert all(node.poll() is None for node in nodes), "the job has ended"
            now = progress()
            assert now is not None
            return now if now[0][1] != before[0][1] else None

        after = wait_until(again, "another process has the place of rank 0")
        assert after[1][1] == before[1][1], "rank 1 keeps its process"
    finally:
        (tmp_path / "stop").touch()
        for node in nodes:
            node.send_signal(signal.SIGCONT)
            node.kill()
            node.wait()
            assert node.stderr is not None
            node.stderr.close()
