"""``rally ps`` for a job of several nodes: who is waited for, which ranks hang, which node is mute."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pace import pace
from ports import free_port
from rallypoint.control.client import connect
from supervisors import RALLY, Popen, run


PATIENCE = 60.0
NODES = 3

HANGS = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
while True:
    for _ in range(20):
        dist.all_reduce(torch.ones(100_000))
    time.sleep(0.05)
    if dist.get_rank() == 2:
        while os.path.exists(os.environ["HANGS_WHILE"]):
            time.sleep(0.1)
"""


def rows(*words: str) -> list[str]:
    """What ``rally ps`` prints about this test's job, without the header."""
    told = run(
        [RALLY, "ps", *words], capture_output=True, text=True, timeout=PATIENCE * pace(), check=True
    )
    return [line for line in told.stdout.splitlines() if line.startswith(name())]


def name() -> str:
    return f"nodes-{os.getpid()}"


def wait_for(look: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE * pace()
    while not look():
        assert time.monotonic() < deadline, f"{what}: {rows()}"
        time.sleep(0.1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    words = [RALLY, "run", "--nnodes", str(NODES), "--rdzv-id", name(), "--insecure"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--hang-after", "4", str(script)]
    ends = {"HANGS_WHILE": str(tmp_path / "hangs")}
    jobs: list[subprocess.Popen[bytes]] = []

    def begin() -> subprocess.Popen[bytes]:
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        jobs.append(Popen(words, env={**os.environ, **ends}, **silent))
        return jobs[-1]

    yield begin
    for each in jobs:
        each.send_signal(signal.SIGCONT)
        each.terminate()
    for each in jobs:
        each.wait(PATIENCE * pace())


def test_ps_of_several_nodes(start: Callable[[], subprocess.Popen[bytes]], tmp_path: Path) -> None:
    for _ in range(NODES - 1):
        start()
    waits = "waiting for nodes, 2 of 3"
    wait_for(lambda: sum(waits in row for row in rows()) == 2, "both wait for the third")

    last = start()
    running = " running "
    wait_for(lambda: sum(running in row for row in rows()) == NODES, "all take part")
    (tmp_path / "hangs").touch()
    # Each node says it, although only node 0 looks for hangs.
    hangs = "HANGING"
    wait_for(lambda: sum(hangs in row for row in rows()) == NODES, "the hang is told")
    # If a node did not answer in time, it is reported later which rank the others wait for.
    hangs = "HANGING: rank 2"
    wait_for(
        lambda: sum(hangs in row and " 1 there " in row for row in rows(str(last.pid))) == NODES,
        "who hangs is told",
    )
    found = rows(str(last.pid))
    assert [f"{rank} of {NODES}" in row for rank, row in enumerate(found)] == [True] * NODES

    told = run([RALLY, "ps", "--json", str(last.pid)], capture_output=True, check=True)
    first, *_ = [json.loads(line) for line in told.stdout.splitlines()]
    assert first["state"] == hangs
    assert first["hang"]["missing"] == [2]
    nodes = connect(str(last.pid)).nodes(patience=PATIENCE)
    assert {rank: told and told["node_rank"] for rank, told in nodes.items()} == {0: 0, 1: 1, 2: 2}
    assert list(connect(str(last.pid)).nodes([1, 77])) == [1]

    start()
    wait_for(lambda: any("waiting to be admitted" in row for row in rows()), "a fourth one waits")

    (tmp_path / "hangs").unlink()
    wait_for(lambda: sum(running in row for row in rows()) == NODES, "it goes on")

    mute = next(rank for rank, told in nodes.items() if told and told["pid"] == last.pid)
    other = next(told["pid"] for told in nodes.values() if told and told["pid"] != last.pid)
    another = connect(str(other))
    last.send_signal(signal.SIGSTOP)
    # Before the others take it for lost, and admit the fourth one.
    assert another.nodes(patience=0.5)[mute] is None
