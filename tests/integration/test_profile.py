"""``rally profile`` on a real job: traces of torch's profiler and of py-spy, without the script's help."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.control.stacks.stack_probe import find_py_spy
from rallypoint.launch.cli import main
from stub_torch import STUB
from supervisors import RALLY, Popen


pytestmark = pytest.mark.integration
PATIENCE = 60.0

TRAINS = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(100, 100)
own = torch.profiler.profile() if len(sys.argv) > 1 else None
if sys.argv[1:] == ["now"]:
    own.start()
print("stands\\n", end="", flush=True)
began = time.monotonic()
while True:
    if sys.argv[1:] == ["soon"] and own is not None and time.monotonic() > began + 4:
        own.start()
        x.sum()
        own.stop()
        own = None
    for _ in range(10):
        x = (x @ x).clamp(0, 1)
    dist.all_reduce(x)
    time.sleep(0.01)
"""
SLEEPS = """
import time

def naps():
    time.sleep(1000)

print("stands\\n", end="", flush=True)
naps()
"""


def start(script: Path, text: str, name: str, env: dict[str, str], *more: str) -> Popen:
    script.write_text(text)
    words = [RALLY, "run", "--nproc-per-node", "2", "--rdzv-id", name, str(script), *more]
    made = Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    assert [made.stdout.readline() for _ in range(2)] == [b"stands\n"] * 2
    return made


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    name = f"profile-{os.getpid()}"
    made = start(tmp_path_factory.mktemp("job") / "trains.py", TRAINS, name, {**os.environ})
    try:
        yield name
    finally:
        made.terminate()
        made.communicate(timeout=PATIENCE)


@pytest.fixture(scope="module")
def without_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    name = f"sleeps-{os.getpid()}"
    env = {**os.environ, "PYTHONPATH": str(STUB)}
    made = start(tmp_path_factory.mktemp("job") / "sleeps.py", SLEEPS, name, env)
    try:
        yield name
    finally:
        made.terminate()
        made.communicate(timeout=PATIENCE)


def test_a_trace_of_all_ranks(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert main(["profile", job, "--seconds", "0.5", "--output", str(path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}: ranks 0, 1, 0.5 s, ") and "perfetto" in line
    events = json.loads(path.read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    found: dict[str, set[str]] = {}
    times: dict[str, list[float]] = {}
    for each in events:
        if each["ph"] == "X" and names[each["pid"]].partition(" (")[0] in {"rank 0", "rank 1"}:
            rank = names[each["pid"]].partition(" (")[0]
            found.setdefault(rank, set()).add(each["name"])
            times.setdefault(rank, []).append(each["ts"])
    assert set(found) == {"rank 0", "rank 1"}
    for each in found.values():
        assert {"aten::mm", "gloo:all_reduce"} <= each
    begins = {rank: min(each) for rank, each in times.items()}
    assert abs(begins["rank 0"] - begins["rank 1"]) < 10e6, "one clock, in microseconds"
    # Again, of one rank: the first time has left nothing behind.
    assert main(["profile", job, "--seconds", "0.2", "--rank", "1", "--output", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: rank 1, ")
    assert os.listdir(tmp_path) == ["trace.json"]


@pytest.mark.parametrize("when", ["now", "soon"])
def test_the_profiler_of_the_script_goes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    name, path = f"own-{os.getpid()}-{when}", tmp_path / "trace.json"
    made = start(tmp_path / "trains.py", TRAINS, name, {**os.environ}, when)
    try:
        code = main(["profile", name, "--seconds", "10", "--rank", "0", "--output", str(path)])
        told = capsys.readouterr()
        if when == "now":
            assert code == 1
            assert told.err == "rally: no trace: rank 0: the script itself uses torch's profiler\n"
        else:
            assert code == 0
            assert (
                "rank 0: only part of that time was recorded: the script started torch's profiler"
                in told.out
            )
        assert made.poll() is None, "the job goes on"
    finally:
        made.terminate()
        made.communicate(timeout=PATIENCE)


def test_samples(without_group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    path = tmp_path / "samples.json"
    words = ["--seconds", "1", "--sampling", "--rank", "1", "--output", str(path)]
    code = main(["profile", without_group, *words])
    told = capsys.readouterr()
    if code and "ermission" in told.err:
        pytest.skip("ptrace is not allowed here")
    assert code == 0, told.err
    body = json.loads(path.read_text())
    assert all(each["name"].startswith("rank 1: ") for each in body["profiles"])


def test_a_worker_without_a_process_group_is_told(
    without_group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    words = ["--seconds", "1", "--rank", "0", "--output", str(path)]
    assert main(["profile", without_group, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("rally: no trace: rank 0: it has no process group") and "--sampling" in line
    )
    assert not path.exists()


def test_mistakes_are_one_line(
    job: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{job}.trace.json").touch()
    for words, code, says in (
        ([job], 2, "exists"),
        ([job, "--seconds", "999"], 2, "expected seconds, from 0.1 to 60"),
        ([job, "--native"], 2, "only py-spy shows C frames"),
        ([job, "--output", "no/where.json"], 2, "there is no such folder"),
        ([job, "--rank", "9", "--output", "x.json"], 1, "no rank 9 on this node"),
        (["no-such-job"], 1, "no job 'no-such-job' of this user runs on this host"),
        ([job, "--what"], 2, "no such flag"),
    ):
        assert main(["profile", *words]) == code, words
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line


@pytest.mark.long
def test_all_nodes_are_recorded_and_their_memory_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    words = [RALLY, "run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "far-profile"]
    words += ["--insecure", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, str(script)]
    nodes = [
        Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ})
        for _ in range(2)
    ]
    try:
        for node in nodes:
            assert node.stdout.readline() == b"stands\n"
        path, asked = tmp_path / "trace.json", str(nodes[0].pid)
        assert main(["profile", asked, "--seconds", "0.2", "--output", str(path)]) == 0
        assert capsys.readouterr().out.startswith(f"{path}: ranks 0, 1, 0.2 s, ")
        assert main(["memory", asked, "--json"]) == 0
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [each["rank"] for each in told] == [0, 1]
        assert all(each["private"] > 1 << 20 for each in told)
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.communicate(timeout=PATIENCE)
