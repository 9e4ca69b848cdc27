"""A rank that makes the others wait is named, with what is different about it; in an even job, none is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rallypoint.control.client import connect
from rallypoint.launch.cli import main
from supervisors import RALLY, Popen


pytestmark = pytest.mark.integration
PATIENCE = 60.0

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist

def burden():
    if how in {"sleep", "fails"}:
        time.sleep(0.05)

how, end = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
child = 0
if how == "pinned" and rank == 2:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    child = os.fork()
    if not child:
        while True:
            pass
x = torch.ones(1000)
while True:
    time.sleep(0.02)
    began = time.thread_time()
    while how == "pinned" and rank == 2 and time.thread_time() < began + 0.02:
        pass
    if rank == 2:
        burden()
    dist.all_reduce(x)
    # All end after the same step.
    stop = torch.tensor([float(os.path.exists(end))])
    dist.all_reduce(stop)
    if stop.item():
        break
if child:
    os.kill(child, 9)
if how == "fails":
    raise ValueError("at last")
dist.destroy_process_group()
"""


class Job:
    def __init__(self, folder: Path, how: str, *flags: str, count: int = 4) -> None:
        script = folder / "train.py"
        script.write_text(TRAIN)
        self.end_file, self.events = folder / "end", folder / "events.jsonl"
        self.name = f"slow-{os.getpid()}-{how}"
        words = [RALLY, "run", "--nproc-per-node", str(count), "--rdzv-id", self.name, *flags]
        self.process = Popen(
            [*words, str(script), how, str(self.end_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "RALLY_EVENTS": os.fspath(self.events)},
        )

    def line(self, pattern: str) -> str:
        """The next line on stderr that matches."""
        shown = b""
        while line := self.process.stderr.readline():
            shown += line
            if re.search(pattern, line.decode()):
                return line.decode()
        raise AssertionError(shown.decode())

    def told(self, kind: str) -> list[dict[str, Any]]:
        lines = self.events.read_text().splitlines() if self.events.exists() else []
        return [each for each in map(json.loads, lines) if each["kind"] == kind]

    def end(self) -> str:
        self.end_file.touch()
        _, shown = self.process.communicate(timeout=PATIENCE)
        return shown.decode()


def test_a_slow_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, "sleep", "--slow-after", "2", "--metrics", ":0")
    try:
        port = job.line("metrics are on port").split()[-1]
        line = job.line("slow")
        assert line.startswith("rally: rank 2 is slow: the others wait for it ")
        assert "it is most often at " in line and f"{tmp_path}/train.py:8 in burden" in line
        # Something else on this machine may be named instead: another's process on the same core.
        assert "it computes no more than they do" in line or "had to wait for a CPU" in line
        (event,) = job.told("worker_slow")
        assert event["rank"] == 2 and 0.2 < event["share"] < 0.9
        assert main(["top", job.name, "--once", "--interval", "0.2"]) == 0
        _head, columns, *rows = capsys.readouterr().out.splitlines()
        assert "WAIT%" in columns
        assert [row.split()[0] for row in rows if "slow: the others wait for it" in row] == ["2"]
        (told,) = [each for each in connect(job.name).usage() if each["rank"] == 2]
        assert told["slowness"]["slow"] and told["slowness"]["waits"] < 0.2
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert re.search(r"rally_worker_slow\{.*rank=\"2\"\} 1.0", answer.read().decode())
    finally:
        shown = job.end()
    assert job.process.returncode == 0
    assert re.search(
        r"rally: rank 2 was slow for \d+s: the others waited for it \d+% of that", shown
    )


@pytest.mark.long
def test_a_rank_that_shares_its_cpu_is_told_with_whom(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    job = Job(tmp_path, "pinned", "--slow-after", "2")
    try:
        line = job.line("slow")
        assert line.startswith("rally: rank 2 is slow")
        assert "had to wait for a CPU" in line and "on the same CPUs" in line
        assert "it may use CPU" in line
    finally:
        job.end()


def test_the_report_of_a_failure_names_it(tmp_path: Path) -> None:
    job = Job(tmp_path, "fails", "--slow-after", "1")
    try:
        job.line("rank 2 is slow")
    finally:
        shown = job.end()
    assert job.process.returncode != 0
    assert re.search(r"\n  slow         rank 2 was slow for \d+s", shown)


@pytest.mark.long
def test_nobody_is_slow_in_an_even_job(tmp_path: Path) -> None:
    job = Job(tmp_path, "even", "--slow-after", "2")
    try:
        time.sleep(20)
        assert job.told("worker_slow") == []
    finally:
        shown = job.end()
    assert job.process.returncode == 0 and "slow" not in shown
