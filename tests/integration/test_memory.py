"""``rally memory``: what the kernel knows of workers and their children, on a real job."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.launch.cli import main
from stub_torch import STUB
from supervisors import RALLY, Popen


pytestmark = pytest.mark.integration
PATIENCE = 30.0
MIB = 1 << 20

HOLDS = """
import mmap, os, sys, time

rank = int(os.environ["RANK"])
own = bytearray(os.urandom(1 << 20) * (20 if rank == 1 else 1))
path = f"/dev/shm/{sys.argv[1]}"
fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 8 << 20)
shared = mmap.mmap(fd, 8 << 20)
shared[:] = bytes(8 << 20)
if rank == 0 and os.fork() == 0:
    time.sleep(1000)
print("stands\\n", end="", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    script = tmp_path_factory.mktemp("job") / "holds.py"
    script.write_text(HOLDS)
    name = f"memory-{os.getpid()}"
    words = [RALLY, "run", "--nproc-per-node", "2", "--rdzv-id", name, str(script), name]
    env = {**os.environ, "PYTHONPATH": str(STUB)}
    made = Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    try:
        assert [made.stdout.readline() for _ in range(2)] == [b"stands\n"] * 2
        yield name
    finally:
        made.terminate()
        made.communicate(timeout=PATIENCE)
        Path(f"/dev/shm/{name}").unlink(missing_ok=True)


def told(job: str, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["memory", job, "--json", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_of_workers_and_children(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    processes = told(job, capsys)
    assert [(each["rank"], bool(each["name"])) for each in processes] == [
        (0, False),
        (0, True),
        (1, False),
    ]
    for each in processes:
        assert each["why"] == "" and each["devices"] == []
        assert 0 < each["pss"] <= each["rss"] == each["private"] + each["shared"]
        assert each["mappings"][0]["pss"] >= each["mappings"][-1]["pss"]
    worker, _, other = processes
    assert other["private"] > worker["private"] + 10 * MIB, "rank 1 has 20 MiB of its own"
    (shared,) = [each for each in other["shared_memory"] if each["name"] == f"/dev/shm/{job}"]
    assert shared["rss"] == 8 * MIB and 2 * MIB < shared["pss"] < 8 * MIB, "three have mapped it"


def test_as_people_read_it(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", job, "--top", "2"]) == 0
    shown = capsys.readouterr().out
    head, *rows = shown.partition("\n\n")[0].splitlines()
    assert head.split() == [
        "RANK",
        "HOST",
        "PID",
        "PROCESS",
        "RSS",
        "PSS",
        "PRIVATE",
        "SHARED",
        "SWAP",
    ]
    assert [row.split()[0] for row in rows] == ["0", "0", "1", "all"]
    assert f"/dev/shm/{job} (ranks 0, 1)" in shown
    assert "largest mappings:" in shown
    (one,) = told(job, capsys, "--rank", "1")
    assert one["rank"] == 1


def test_mistakes_are_one_line(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, says in (
        (["memory", job, "--rank", "9"], 1, "no rank 9 on this node (it has ranks 0, 1)"),
        (["memory", job, "--what"], 2, "no such flag (known: --rank, --top, --here, --json)"),
        (["memory", job, "--rank"], 2, "expected a value"),
        (["memory", job, "--top", "99"], 2, "expected a number from 1 to 12"),
        (["memory", job, "another"], 2, "expected one job"),
        (["memory", "no-such-job"], 1, "no job 'no-such-job' of this user runs on this host"),
    ):
        assert main(words) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
