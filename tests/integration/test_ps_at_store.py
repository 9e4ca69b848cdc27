"""``rally ps`` for a job that has no supervisor here: its nodes are asked through their store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pace import pace
from ports import free_port
from supervisors import RALLY, Popen, run


PATIENCE = 60.0
NODES = 3
SECRET = "something that nobody else knows"

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture(params=["tcp", "file"])
def meets(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Flags by which the nodes meet."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    where = f"127.0.0.1:{free_port()}" if request.param == "tcp" else f"file://{tmp_path}/meet"
    (tmp_path / "meet").mkdir()
    # A stopped supervisor must not be taken for lost.
    patient = ["--rdzv-conf", "lease=60"]
    return ["--rdzv-endpoint", where, "--secret-file", str(secret), *patient]


@pytest.fixture
def start(meets: list[str], tmp_path: Path) -> Iterator[Start]:
    script = tmp_path / "idles.py"
    script.write_text("import time\ntime.sleep(600)\n")
    words = [RALLY, "run", "--nnodes", str(NODES), "--rdzv-id", "far", *meets, "--start-method"]
    words += ["spawn", str(script)]
    jobs: list[subprocess.Popen[bytes]] = []

    def begin() -> subprocess.Popen[bytes]:
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        jobs.append(Popen(words, **silent))
        return jobs[-1]

    yield begin
    for each in jobs:
        each.send_signal(signal.SIGCONT)
        each.terminate()
    for each in jobs:
        each.wait(PATIENCE * pace())


def ps(*words: str) -> subprocess.CompletedProcess[str]:
    return run([RALLY, "ps", *words], capture_output=True, text=True, timeout=PATIENCE * pace())


def wait_for(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE * pace()
    while not look():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_a_job_of_other_hosts(start: Start, meets: list[str], tmp_path: Path) -> None:
    for _ in range(NODES - 1):
        start()
    waits = "the nodes of job 'far' have not met yet"
    wait_for(lambda: waits in ps("far", *meets).stderr, "it is told that nodes are waited for")

    start()
    wait_for(lambda: ps("far", *meets).returncode == 0, "the nodes are shown")
    shown = ps("far", *meets).stdout.splitlines()[1:]
    assert [f"{rank} of {NODES}" in row for rank, row in enumerate(shown)] == [True] * NODES
    assert all(row.startswith("far ") and " 1 there " in row for row in shown)
    told = ps("--json", *meets, "--rdzv-id", "far").stdout.splitlines()
    assert [json.loads(line)["node_rank"] for line in told] == list(range(NODES))

    other = ps("near", *meets)
    assert other.returncode == 1
    assert "no job 'near' meets there" in other.stderr
    (tmp_path / "other").write_text("another secret than theirs")
    (tmp_path / "other").chmod(0o600)
    stranger = ps("far", *meets[:2], "--secret-file", str(tmp_path / "other"))
    assert stranger.returncode == 1
    assert "another secret" in stranger.stderr

    # A node that stands still is reported as such, and does not hold up anybody who asks after that.
    first = json.loads(told[0])["pid"]
    os.kill(first, signal.SIGSTOP)
    try:
        mute = ps("far", *meets)
    finally:
        os.kill(first, signal.SIGCONT)
    assert mute.returncode == 0
    assert mute.stdout.count("does not answer") == 1
    for _ in range(3):
        assert "does not answer" not in ps("far", *meets).stdout


def test_a_place_where_nobody_meets() -> None:
    where = f"127.0.0.1:{free_port()}"
    found = ps("--rdzv-endpoint", where, "--insecure")
    assert found.returncode == 1
    assert f"cannot reach the rendezvous at {where}" in found.stderr
    assert "Traceback" not in found.stderr
