"""The events of real jobs: what each part says, in the order in which it happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rpc_workers
from rallypoint import events, rpc
from rallypoint.errors import PeerLost
from rallypoint.testing import Ranks
from rpc_workers import Workers
from stub_torch import STUB


pytestmark = pytest.mark.integration


def launched(
    tmp_path: Path, source: str, *flags: str, **env: str
) -> tuple[int, list[dict[str, Any]]]:
    script = tmp_path / "train.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "run", *flags, str(script)],
        env={**os.environ, "PYTHONPATH": str(STUB), "RALLY_EVENTS": "events.jsonl", **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    return done.returncode, [json.loads(line) for line in lines]


def test_a_restarted_job_tells_its_story(tmp_path: Path) -> None:
    fifo = tmp_path / "rank 0 has spoken"
    os.mkfifo(fifo)
    source = (
        "import os, signal\n"
        "from rallypoint import events\n"
        "os.chdir('/')\n"  # the path in the variable was relative
        "events.emit(events.RanOut(rank=int(os.environ['RANK']), steps=7))\n"
        "if os.environ['RALLY_GENERATION'] == '0':\n"
        "    if os.environ['RANK'] == '1':\n"
        f"        open({str(fifo)!r}).read()\n"
        "        raise ValueError('bad batch 7\\nand more')\n"
        f"    open({str(fifo)!r}, 'w').close()\n"
        "    signal.pause()\n"
    )
    code, found = launched(
        tmp_path, source, "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", "j"
    )
    assert code == 0
    ours = [each for each in found if each["kind"] != "ran_out"]
    assert [each["kind"] for each in ours] == [
        "job_started",
        *("generation_started", "worker_started", "worker_started"),
        *("worker_ended", "worker_ended", "generation_ended"),
        *("generation_started", "worker_started", "worker_started"),
        *("worker_ended", "worker_ended", "generation_ended"),
        "job_ended",
    ]
    first, second = [each for each in ours if each["kind"] == "worker_ended"][:2]
    assert (first["rank"], first["exit_code"], first["stopped"]) == (1, 1, False)
    assert first["error"] == "raised ValueError: bad batch 7"
    assert (second["rank"], second["signal"], second["stopped"]) == (0, 15, True)
    ends = [each for each in ours if each["kind"] == "generation_ended"]
    assert [(each["aim"], each["failed_ranks"]) for each in ends] == [
        ("restart", [1, 0]),
        ("succeed", []),
    ]
    assert (ours[-1]["aim"], ours[-1]["restarts"], ours[-1]["run_id"]) == ("succeed", 1, "j")
    # Workers write to the same file: in both generations, two ranks.
    assert sorted(each["rank"] for each in found if each["kind"] == "ran_out") == [0, 0, 1, 1]
    started = {each["worker_pid"] for each in ours if each["kind"] == "worker_started"}
    assert {each["pid"] for each in found if each["kind"] == "ran_out"} == started


def test_a_failed_job_tells_its_cause(tmp_path: Path) -> None:
    code, found = launched(tmp_path, "import sys; sys.exit('no data')", "--nproc-per-node", "1")
    assert code == 1
    assert (found[-1]["kind"], found[-1]["aim"]) == ("job_ended", "fail")
    assert found[-1]["cause"] == "rank 0 exited with code 1: no data"


def train_unevenly(batches: int, *, replay: bool) -> list[tuple[str, dict[str, Any]]]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from rallypoint.join import Join

    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    heard: list[events.Event] = []
    with events.subscribe(heard.append):
        if replay:
            with Join([model]) as join:
                for batch in join.batches([torch.ones(1, 2)] * (batches + rank)):
                    model(batch).sum().backward()
        else:
            with Join([model], steps=batches + rank):
                for _ in range(batches + rank):
                    model(torch.ones(1, 2)).sum().backward()
    return [(each.kind, each.fields()) for each in heard]


@pytest.mark.parametrize("replay", [True, False], ids=["batches", "steps"])
def test_a_rank_that_runs_out_says_so(replay: bool) -> None:
    ranks = Ranks(2)
    try:
        short, long = ranks.run(lambda: train_unevenly(2, replay=replay))
    finally:
        ranks.close()
    assert short == [
        ("ran_out", {"rank": 0, "steps": 2}),
        ("join_ended", {"rank": 0, "own_steps": 2, "steps": 3}),
    ]
    assert long == [("join_ended", {"rank": 1, "own_steps": 3, "steps": 3})]


HEARD: list[events.Event] = []


def listen() -> None:
    events.subscribe(HEARD.append)


def what_was_heard(count: int) -> list[tuple[str, str]]:
    rpc_workers.eventually(lambda: len(HEARD) >= count)
    return [(each.kind, str(getattr(each, "worker", ""))) for each in HEARD]


def wait_until_gone() -> None:
    with pytest.raises(PeerLost):
        rpc.rpc_sync("w1", time.sleep, args=(60,), timeout=60)


def test_an_agent_says_who_is_gone() -> None:
    with Workers(2) as workers:
        workers.on(0, listen)
        workers.run(rpc_workers.join)
        waiting = workers.begin(0, wait_until_gone)
        workers.kill(1)
        waiting.result()
        assert workers.on(0, what_was_heard, 2) == [("agent_started", "w0"), ("member_gone", "w1")]


def test_a_lost_fork_server_is_a_failure(tmp_path: Path) -> None:
    source = (
        "import os, signal\n"
        "os.kill(int(open('/proc/self/stat').read().split()[3]), signal.SIGKILL)\n"
        "signal.pause()\n"
    )
    code, found = launched(tmp_path, source, "--nproc-per-node", "1")
    assert code == 1
    ended, job = found[-2:]
    assert (ended["kind"], ended["aim"]) == ("generation_ended", "fail")
    assert (job["kind"], job["aim"]) == ("job_ended", "fail")
    assert "was killed by SIGKILL" in job["cause"]
