"""Warm spares: they wait in the session, take over lost ranks, and go unnoticed until then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic import wait_until
from rallypoint.control.client import connect
from supervisors import Popen


pytestmark = pytest.mark.integration

SCRIPT = """
import hashlib, json, os, pathlib, sys, threading
ASKS = sys.argv[2] == "asks"
if ASKS:
    early = int(os.environ["RANK"])
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
with open(FOLDER / "set-ups", "a") as file:
    file.write(f"{os.getpid()}\\n")
print("set up", flush=True)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
told = [None]
dist.broadcast_object_list(told)
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(240, 8))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
with elastic.session(net, optimizer) as session:
    rank = dist.get_rank()
    assert str(rank) == os.environ["RANK"] and sampler.rank == rank
    assert not ASKS or early == rank
    print(f"trains as {rank}", flush=True)
    def gate():
        if rank == 0 and session.position in {10, 20, 30}:
            while not (FOLDER / f"go {session.position}").exists():
                threading.Event().wait(0.01)
    for (x,) in session.batches(loader):
        with session.step():
            (FOLDER / f"at {rank}").write_text(f"{session.position} {os.getpid()}")
            gate()
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    end = [session.position, hashlib.sha256(bits).hexdigest(), torch.rand(1).item()]
(FOLDER / f"end {rank}").write_text(json.dumps([*end, os.getpid()]))
dist.destroy_process_group()
"""
RANKS = 3


class Job:
    """A job that waits before its steps 10, 20 and 30 until it is told to go on."""

    def __init__(self, folder: Path, spares: int, *, asks: bool = False) -> None:
        folder.mkdir()
        self.folder = folder
        path = folder / "train.py"
        path.write_text(SCRIPT)
        flags = ["--nproc-per-node", str(RANKS), "--spares", str(spares)]
        self.popen = Popen(
            [
                *(sys.executable, "-m", "rallypoint", "run", *flags, "--preload", "torch._dynamo"),
                *(str(path), str(folder), "asks" if asks else "-"),
            ],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def status(self) -> dict[str, Any]:
        return connect(str(self.popen.pid)).status()

    def reach(self, step: int) -> None:
        """Wait until all ranks are at this step."""
        wait_until(lambda: self._steps() == [step] * RANKS, f"all at step {step}", 60)

    def _steps(self) -> list[int]:
        found = [self.folder / f"at {rank}" for rank in range(RANKS)]
        texts = [path.read_text() if path.exists() else "" for path in found]
        return [int(text.split()[0]) if text else -1 for text in texts]

    def spares(self, count: int, but: tuple[int, ...] = ()) -> list[int]:
        """The pids of the spares, once this many wait."""

        def look() -> list[int] | None:
            told = self.status()["spares"]
            pids = [each["pid"] for each in told if each["state"] == "waiting"]
            return pids if len(pids) == count and not set(pids) & set(but) else None

        return wait_until(look, f"{count} spares wait", 60)

    def pid(self, rank: int) -> int:
        return next(e["pid"] for e in self.status()["workers"] if e["rank"] == rank)

    def pids(self) -> list[int]:
        return [self.pid(rank) for rank in range(RANKS)]

    def go(self, step: int) -> None:
        (self.folder / f"go {step}").touch()

    def end(self) -> tuple[str, str, list[Any], list[int]]:
        """Let it end. Returns what it wrote and said, and its ends: state and pids."""
        for step in (10, 20, 30):
            self.go(step)
        out, err = self.popen.communicate(timeout=90)
        assert self.popen.returncode == 0, err
        ends = [json.loads((self.folder / f"end {rank}").read_text()) for rank in range(RANKS)]
        return out, err, [end[:-1] for end in ends], [end[-1] for end in ends]


@pytest.fixture(name="start")
def _start(tmp_path: Path) -> Any:
    jobs = []

    def begin(spares: int, *, asks: bool = False) -> Job:
        jobs.append(Job(tmp_path / f"job {len(jobs)}", spares, asks=asks))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.popen.poll() is None:  # the test has failed: show what the job did
            try:
                print(json.dumps(job.status()))
            finally:
                job.popen.terminate()
                print(*job.popen.communicate(timeout=30), sep="\n")


Start = Callable[..., Job]


@pytest.fixture(scope="module", name="calm")
def _calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    job = Job(tmp_path_factory.mktemp("calm") / "job", 0)
    _, err, ends, _ = job.end()
    assert err == ""
    return ends


def test_a_spare_takes_over_any_rank_and_another_one_follows_it(
    start: Start, calm: list[Any]
) -> None:
    job = start(1)
    job.reach(10)
    (first,) = job.spares(1)
    pids = job.pids()
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: job.pid(0) == first, "the spare is rank 0")
    (second,) = job.spares(1, but=(first,))
    job.go(10)
    job.reach(20)
    os.kill(job.pid(1), signal.SIGKILL)
    wait_until(lambda: job.pid(1) == second, "the next one is rank 1")
    out, err, ends, last = job.end()
    assert ends == calm
    assert last == [first, second, pids[2]]
    assert err.count("a spare takes its place, the others keep theirs") == 2
    # A spare is heard only once it has a place.
    assert out.count("set up") == RANKS
    assert out.count("trains as 0") == out.count("trains as 1") == 2


def test_two_lost_with_one_spare(start: Start, calm: list[Any]) -> None:
    job = start(1)
    job.reach(10)
    (spare,) = job.spares(1)
    pids = job.pids()
    os.kill(pids[1], signal.SIGKILL)
    os.kill(pids[2], signal.SIGKILL)
    _, err, ends, last = job.end()
    assert ends == calm
    assert last[0] == pids[0]
    assert spare in last[1:]
    assert err.count("a spare takes its place") == err.count("another process takes its place") == 1


def test_a_killed_spare_is_replaced_without_a_word(start: Start, calm: list[Any]) -> None:
    job = start(1)
    job.reach(10)
    (spare,) = job.spares(1)
    os.kill(spare, signal.SIGKILL)
    (other,) = job.spares(1, but=(spare,))
    pids = job.pids()
    out, err, ends, last = job.end()
    assert (err, ends, last) == ("", calm, pids)
    assert out.count("set up") == RANKS
    assert not Path(f"/proc/{other}").exists()


def test_a_spare_of_a_script_that_asks_for_its_rank_is_that_rank_only(
    start: Start, calm: list[Any]
) -> None:
    job = start(1, asks=True)
    job.reach(10)
    (spare,) = job.spares(1)
    os.kill(job.pid(1), signal.SIGKILL)
    job.go(10)
    job.reach(20)
    assert job.spares(1) == [spare]
    os.kill(job.pid(2), signal.SIGKILL)
    wait_until(lambda: job.pid(2) == spare, "the spare is rank 2")
    _, err, ends, last = job.end()
    assert ends == calm
    assert last[2] == spare
    assert "can take over only rank 2: train.py:5 asks for the rank before the session" in err
    assert "rank 1 was killed by SIGKILL; another process takes its place" in err
