"""On a real Slurm cluster, where there is one: run from a login node, in a folder that all nodes share.

SLURM_SHARED=/shared/folder python -m pytest -m long tests/integration/test_slurm.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parents[1] / "faults" / "scripts"
SAVER = SCRIPTS / "saver.py"
ONCE_75 = SCRIPTS / "once_75.py"


def slurm(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture
def submit() -> Iterator[Callable[..., tuple[str, Path]]]:
    """``submit(*flags)``: an `sbatch` of two nodes with a worker each. Returns its number, and the folder of the notes."""
    if shutil.which("sbatch") is None or subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("needs a Slurm cluster (sbatch, sinfo)")
    shared = os.environ.get("SLURM_SHARED")
    if shared is None:
        pytest.skip("needs SLURM_SHARED, a folder that all nodes see")
    folder = Path(shared, f"rally-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    jobs = []

    def run(
        *flags: str, srun: str = "", sbatch: tuple[str, ...] = (), script: Path = SAVER
    ) -> tuple[str, Path]:
        line = f"srun {srun} {sys.executable} -m rallypoint run {' '.join(flags)} {script}"
        words = ("sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "-o", str(folder / "log"))
        words += ("--open-mode=append", *sbatch)
        env = f"--export=ALL,WORKER_NOTES={folder}"
        jobs.append(slurm(*words, env, "--wrap", line).strip())
        return jobs[-1], folder

    yield run
    for job in jobs:
        subprocess.run(["scancel", job], check=False)
    shutil.rmtree(folder)


def notes(folder: Path, pattern: str, count: int) -> list[str]:
    end = time.monotonic() + 240
    while len(found := sorted(folder.glob(pattern))) < count:
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.2)
    return [path.read_text() for path in found]


@pytest.mark.parametrize("nodes", [(), ("--nnodes", "2:3")], ids=["fixed", "elastic"])
def test_scancel_has_a_session_take_its_last_checkpoint(submit, nodes):
    job, folder = submit(
        *("--nproc-per-node", "2", "--rdzv-conf", "last_call_timeout=3", *nodes),
        script=SCRIPTS / "endless_session.py",
    )
    notes(folder, "began.*", 4)
    time.sleep(3)
    slurm("scancel", job)
    notes(folder, "checkpoints/*/checkpoint.json", 1)
    log = folder / "log"
    deadline = time.monotonic() + 60
    while "all workers have ended" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    assert log.read_text().count("told to stop: the last checkpoint, of step") == 1


def test_scancel_lets_all_workers_write_their_last_checkpoint(submit):
    job, folder = submit()
    notes(folder, "loop.0.*", 2)
    slurm("scancel", "--signal=USR1", job)
    notes(folder, "count.10.*", 2)
    slurm("scancel", job)
    # USR1 and TERM (scancel sends CONT with it), each once.
    assert notes(folder, "saved.0.*", 2) == ["10:1 15:1 18:1"] * 2, (folder / "log").read_text()


def test_a_signal_to_pass_comes_once(submit):
    job, folder = submit("--signals-to-pass", "USR2")
    notes(folder, "loop.0.*", 2)
    slurm("scancel", "--signal=USR2", job)
    assert notes(folder, "count.12.*", 2) == ["1", "1"]
    slurm("scancel", job)
    assert notes(folder, "saved.0.*", 2) == ["12:1 15:1 18:1"] * 2


def ended(job: str, state: str) -> str:
    """Wait until a job is in this state. Returns what Slurm says about it."""
    end = time.monotonic() + 240
    while f"JobState={state} " not in (told := slurm("scontrol", "show", "job", job)):
        assert time.monotonic() < end, told
        time.sleep(0.5)
    return told


@pytest.mark.parametrize("srun", ["", "--no-kill --kill-on-bad-exit=0"])
def test_an_elastic_job_needs_no_flag_about_where_nodes_meet(submit, srun):
    job, folder = submit("--nnodes", "1:2", srun=srun)
    notes(folder, "loop.0.*", 2)
    slurm("scancel", job)
    notes(folder, "saved.0.*", 2)
    log = (folder / "log").read_text()
    assert log.count("Slurm ends this elastic job when a node is lost") == (not srun), log


def test_a_requeued_job_writes_its_last_checkpoint_and_starts_again(submit):
    job, folder = submit("--nnodes", "1:2", srun="--no-kill", sbatch=("--requeue",))
    first = notes(folder, "loop.0.*", 2)
    slurm("scontrol", "requeue", job)
    notes(folder, "saved.0.*", 2)
    for path in folder.glob("loop.0.*"):
        path.unlink()
    assert notes(folder, "loop.0.*", 2) != first
    assert "Restarts=1 " in slurm("scontrol", "show", "job", job)
    slurm("scancel", job)
    ended(job, "CANCELLED")


@pytest.mark.parametrize("signal", [(), ("--signal=TERM@30",)])
def test_the_time_limit_leaves_time_for_the_last_checkpoint(submit, signal):
    job, folder = submit("--nnodes", "1:2", srun="--no-kill", sbatch=("--time=1", *signal))
    notes(folder, "loop.0.*", 2)
    notes(folder, "saved.0.*", 2)
    # A job that ends at the early signal has ended on its own, 143 being its own exit code.
    told = ended(job, "FAILED" if signal else "TIMEOUT")
    assert not signal or "ExitCode=143:0" in told


def test_a_script_requeues_its_job_by_an_exit_code(submit):
    """The lines of docs/clusters/slurm.md."""
    job, folder = submit()
    slurm("scancel", job)
    script = folder / "again.sh"
    script.write_text(
        f"#!/bin/bash\necho start $SLURM_RESTART_COUNT\n"
        f"srun {sys.executable} -m rallypoint run --no-python"
        " bash -c '[ -n \"$SLURM_RESTART_COUNT\" ] || exit 75'\n"
        "code=$?\n"
        '[ $code -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"\n'
        "exit $code\n"
    )
    log = folder / "again.log"
    words = ("sbatch", "--parsable", "--requeue", "-N2", "--open-mode=append", "-o", str(log))
    again = slurm(*words, str(script)).strip()
    ended(again, "COMPLETED")
    assert [line for line in log.read_text().splitlines() if line.startswith("start")] == [
        "start",
        "start 1",
    ]


def test_a_job_is_requeued_by_the_exit_code_of_a_worker(submit):
    job, folder = submit("--requeue-on", "75", sbatch=("--requeue",), script=ONCE_75)
    ended(job, "COMPLETED")
    log = (folder / "log").read_text()
    assert log.count(f"exit code 75: Slurm's job {job} is requeued") == 1, log
    assert "Restarts=1 " in slurm("scontrol", "show", "job", job)


@pytest.mark.parametrize("nodes", [(), ("--nnodes", "1:2")], ids=["fixed", "elastic"])
def test_a_job_is_requeued_after_the_early_signal_and_not_after_scancel(submit, nodes):
    words = ("--requeue-on", "143", *nodes)
    job, folder = submit(
        *words, srun="--no-kill", sbatch=("--requeue", "--time=1", "--signal=TERM@45")
    )
    first = notes(folder, "loop.0.*", 2)
    notes(folder, "saved.0.*", 2)
    for path in folder.glob("loop.0.*"):
        path.unlink()
    assert notes(folder, "loop.0.*", 2) != first
    slurm("scancel", job)
    ended(job, "CANCELLED")
    log = (folder / "log").read_text()
    assert log.count("is requeued") == 1, log
    assert "Restarts=1 " in slurm("scontrol", "show", "job", job)


@pytest.mark.parametrize("code", [0, 7])
def test_a_job_that_rally_submits(code: int) -> None:
    shared = os.environ.get("SLURM_SHARED")
    if shared is None or shutil.which("sbatch") is None:
        pytest.skip("needs sbatch, and SLURM_SHARED, a folder that all nodes see")
    folder = Path(shared, f"rally-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    script = folder / "ranks.py"
    script.write_text(
        "import os, sys\nos.write(1, f\"rank {os.environ['RANK']}\\n\".encode())\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    rally = (sys.executable, "-m", "rallypoint", "submit", "slurm", "--nodes", "2")
    options = (f"--output={folder}/out", "--wait", "--comment=x")
    target = ("--nproc-per-node", "2", "--start-method", "exec", str(script), str(code))
    done = subprocess.run([*rally, *options, "--", *target], timeout=300, check=False)
    lines = (folder / "out").read_text().splitlines()
    assert done.returncode == code, lines
    assert len([line for line in lines if line.startswith("rank ")]) == 4 or code
    assert not [line for line in lines if "no secret" in line]
    shutil.rmtree(folder)


def test_a_listed_node_is_left_out_and_not_asked_for_again(submit, tmp_path):
    job, folder = submit(
        *("--nnodes", "1:2", "--avoid-hosts", "$WORKER_NOTES/bad", "--rdzv-conf"),
        "last_call_timeout=1",
        srun="--no-kill",
        sbatch=("--hold",),
    )
    node = slurm("sinfo", "--noheader", "--Node", "--format=%N").split()[0]
    (folder / "bad").write_text(f"{node}\n")
    slurm("scontrol", "update", f"JobId={job}", f"ReqNodeList={node}")
    slurm("scontrol", "release", job)
    notes(folder, "loop.0.*", 1)
    assert f"{node} is left out (--avoid-hosts" in (folder / "log").read_text()
    assert len(list(folder.glob("loop.0.*"))) == 1
    slurm("scancel", job)
    words = ("--dry-run", "--", "--avoid-hosts", str(folder / "bad"), "x.py")
    rally = (sys.executable, "-m", "rallypoint", "submit", "slurm")
    assert f"#SBATCH --exclude={node}\n" in slurm(*rally, *words)
