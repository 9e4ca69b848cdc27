"""A worker dies and the job starts again: at the first attempt, from a warm server, over a fresh store."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

import pytest

from ports import free_port
from supervisors import run


pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def notes(job, kind: str, generation: int) -> list:
    """What the ranks of a generation noted, by rank."""
    found = job.notes(f"{kind}.{generation}.*")
    return [json.loads(found[name]) for name in sorted(found, key=lambda n: int(n.split(".")[2]))]


@pytest.mark.parametrize(("method", "workers"), [("forkserver", 4), ("exec", 2)])
def test_kill_9_of_a_worker_and_the_first_restart_succeeds(start, tmp_path, method, workers):
    logs = tmp_path / "logs"
    job = start(
        *("--nproc-per-node", str(workers), "--max-restarts", "3", "--start-method", method),
        *("--log-dir", str(logs), "--redirects", "3"),
        script="rounds.py",
        worker=("--waits",),
    )
    pids = [int(text) for text in job.wait_for("pid.0.*", workers).values()]
    server = job.server()
    job.kill(pids[1])
    assert job.end() == 0, job.stderr()
    assert not job.alive()

    expected = sum(range(1, workers + 1))
    assert notes(job, "sum", 1) == [expected] * workers, "a collective with everybody"
    assert not job.notes("env.2.*"), "one restart was enough"
    for generation in (0, 1):
        for seen in notes(job, "env", generation):
            assert seen["TORCHELASTIC_RESTART_COUNT"] == str(generation)
            assert seen["TORCHELASTIC_MAX_RESTARTS"] == "3"
            assert seen["parent"] == server, "the server stays, and is warm"
    ports = [{seen["MASTER_PORT"] for seen in notes(job, "env", g)} for g in (0, 1)]
    assert [len(each) for each in ports] == [1, 1]
    assert ports[0] != ports[1], "the store of a generation is its own"

    said = job.stderr()
    assert re.search(
        r"rank 1 was killed by SIGKILL.*restarting all workers \(attempt 2 of 4\)", said
    ), said
    assert "the job failed" not in said

    folder = next(logs.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == ["attempt_0", "attempt_1"]
    ends = [
        (folder / f"attempt_1/{rank}/stdout.log").read_text().strip() for rank in range(workers)
    ]
    assert ends == [f"rank {rank} of generation 1 ended well" for rank in range(workers)]
    assert (folder / "attempt_0/1/stderr.log").exists(), "logs of earlier attempts are kept"
    record = json.loads((folder / "attempt_0/1/error.json").read_text())
    assert record["message"]["message"] == "was killed by SIGKILL"


def test_a_given_master_port_is_kept_over_restarts(start):
    port = str(free_port())
    job = start(
        *("--nproc-per-node", "2", "--max-restarts", "2", "--master-port", port),
        script="rounds.py",
        worker=("--dies", "2"),
    )
    assert job.end() == 0, job.stderr()
    for generation in range(3):
        assert {seen["MASTER_PORT"] for seen in notes(job, "env", generation)} == {port}
        assert notes(job, "sum", generation) == [3.0, 3.0]


def test_the_store_outlives_rank_0(start):
    job = start("--nproc-per-node", "3", script="rounds.py", worker=("--rank-0-leaves",))
    assert job.end() == 0, job.stderr()
    assert [json.loads(text) for text in job.notes("store.0.*").values()] == [[1, 2], [1, 2]]
    assert not job.alive()


def test_when_restarts_are_used_up_the_last_failure_is_reported(start, tmp_path):
    logs = tmp_path / "logs"
    job = start(
        *("--nproc-per-node", "2", "--max-restarts", "2", "--log-dir", str(logs)),
        script="rounds.py",
        worker=("--dies", "9"),
    )
    assert job.end() == 128 + signal.SIGKILL
    said = job.stderr()
    assert [int(n) for n in re.findall(r"\(attempt (\d) of 3\)", said)] == [2, 3]
    assert said.count("the job failed") == 1
    assert "rank 0 was killed by SIGKILL" in said.split("the job failed")[1], said
    assert "attempt 3 of 3" in said
    folder = next(logs.iterdir())
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["attempt_0", "attempt_1", "attempt_2", "report.json"]
    report = json.loads((folder / "report.json").read_text())
    assert report["root_cause"]["generation"] == 2
    assert report["max_restarts"] == 2
    assert report["log_folder"] == str(folder / "attempt_2")
    # Each generation's record says who died in it.
    for generation in range(3):
        file = folder / f"attempt_{generation}/{generation % 2}/error.json"
        assert json.loads(file.read_text())["message"]["errorCode"] == 128 + signal.SIGKILL


def test_the_store_dies_and_the_next_generation_has_another(start):
    job = start(
        *("--nproc-per-node", "2", "--max-restarts", "1"), script="rounds.py", worker=("--waits",)
    )
    job.wait_for("pid.0.*", 2)
    os.kill(job.store(), signal.SIGKILL)
    assert job.end() == 0, job.stderr()
    assert notes(job, "sum", 1) == [3.0, 3.0]
    assert "the process that serves the workers' store ended (signal 9); restarting" in job.stderr()


def test_a_success_after_restarts_says_nothing_of_failure(start, tmp_path):
    """Nothing to read later: no report file, exit code 0, and the given log folder holds all attempts."""
    job = start(
        *("--nproc-per-node", "2", "--max-restarts", "3", "--log-dir", str(tmp_path / "logs")),
        script="rounds.py",
        worker=("--dies", "1"),
    )
    assert job.end() == 0
    folder = next((tmp_path / "logs").iterdir())
    assert sorted(path.name for path in folder.iterdir()) == ["attempt_0", "attempt_1"]
    assert "the job failed" not in job.stderr()


@pytest.mark.parametrize(("window", "attempts"), [("0.5", 4), ("60", 2), ("0", 2)])
def test_a_restart_that_was_long_ago_counts_no_longer(tmp_path, window, attempts):
    """Three attempts fail, each after 0.8 s."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys, time\n"
        "with open('attempts', 'a') as file: file.write('x')\n"
        "if len(open('attempts').read()) < 4: time.sleep(0.8); sys.exit(7)\n"
    )
    flags = ["--nproc-per-node", "1", "--max-restarts", "1", "--restart-window", window]
    command = [sys.executable, "-m", "rallypoint", "run", *flags, str(script)]
    done = run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert len((tmp_path / "attempts").read_text()) == attempts, done.stderr
    assert done.returncode == (0 if attempts == 4 else 7), done.stderr
    if window == "0.5":
        assert done.stderr.count("restarting all workers (restart 1 of 1 in 0.5 s)") == 3
