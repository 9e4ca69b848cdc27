"""Frameworks on tiny models, under torchrun and under `rally run`: what their users would see."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path

import psutil
import pytest

from wild.launches import Done, run, start


pytestmark = [pytest.mark.wild, pytest.mark.timeout(900)]

# Script, and the package it needs.
SCRIPTS = {
    "hydra_app.py": "hydra",
    "accelerate_loop.py": "accelerate",
    "ignite_loop.py": "ignite",
    "trainer.py": "transformers",
    "lightning_loop.py": "lightning",
    "fsdp2_checkpoint.py": "torch",
}
# These have no checkpoints.
MORE = {"graph_loop.py": "torch_geometric", "recorded.py": "torch"}
# Its collector keeps a failed interpreter waiting for processes of its own.
SLOW_TO_FAIL = {"rl_loop.py": "torchrl"}
# What is run in continuous integration, in half a minute: packages that are small and start fast.
SAMPLE_OF_RESULTS, SAMPLE_OF_REPORTS = {"hydra_app.py", "accelerate_loop.py"}, {"hydra_app.py"}
# Under torchrun an interpreter runs torch's destructors as it exits, and now and then they abort it.
ABORTS = "terminate called without an active exception"
# As docs/frameworks.md has it: each rank a folder of its own.
ARGUMENTS = {"hydra_app.py": ("hydra.run.dir=${oc.env:WILD_OUT}/hydra/${oc.env:RANK}", "lr=0.04")}


def parameters(scripts: Mapping[str, str], sample: Collection[str] = ()) -> pytest.MarkDecorator:
    found = []
    for script, package in scripts.items():
        marks = [pytest.mark.sample] if script in sample else []
        if importlib.util.find_spec(package) is None:
            marks.append(pytest.mark.skip(reason=f"{package} is missing: `make wild` installs it"))
        arguments = ARGUMENTS.get(script, ())
        found.append(pytest.param(script, arguments, marks=marks, id=script.removesuffix(".py")))
    return pytest.mark.parametrize(("script", "args"), found)


Trained = Callable[[str, tuple[str, ...]], Done]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What a script does under `rally run` when nothing happens to it; each is run once."""

    @cache
    def of(script: str, args: tuple[str, ...]) -> Done:
        return run("rally", script, tmp_path_factory.mktemp("trained") / "out", args=args)

    return of


@parameters(SCRIPTS | MORE | SLOW_TO_FAIL, SAMPLE_OF_RESULTS)
def test_results_are_those_of_torchrun_to_the_bit(
    script: str, args: tuple[str, ...], trained: Trained, tmp_path: Path
) -> None:
    ours = trained(script, args)
    theirs = run("torchrun", script, tmp_path / "torchrun", args=args)
    if ABORTS in theirs.stderr:
        theirs = run("torchrun", script, tmp_path / "again", args=args)
    assert (ours.code, theirs.code) == (0, 0), ours.stderr + theirs.stderr
    assert len(ours.told) == 2 and ours.told == theirs.told


@parameters(SCRIPTS | MORE, SAMPLE_OF_REPORTS)
def test_the_report_names_the_users_own_error(
    script: str, args: tuple[str, ...], tmp_path: Path
) -> None:
    done = run("rally", script, tmp_path / "out", args=args, mode="fail")
    assert done.code == 1
    report = done.stderr[done.stderr.index("rally: the job failed") :]
    assert "root cause   rank 1 (local rank 1)" in report
    # Hydra prints what the job has raised, and leaves with SystemExit.
    where = done.stderr if script == "hydra_app.py" else report
    assert "ValueError: shard 7 has no labels" in where
    assert "in after_step" in where


@parameters(SCRIPTS)
def test_a_restarted_job_ends_with_the_weights_of_one_that_never_failed(
    script: str, args: tuple[str, ...], trained: Trained, tmp_path: Path
) -> None:
    whole = trained(script, args)
    again = run(
        "rally", script, tmp_path / "again", "--max-restarts", "1", args=args, mode="restart"
    )
    assert (whole.code, again.code) == (0, 0), whole.stderr + again.stderr
    assert "shard 8 has no labels" in again.stderr
    assert [each["attempt"] for each in again.told] == [1, 1]
    assert [each["weights"] for each in again.told] == [each["weights"] for each in whole.told]


@parameters(SCRIPTS)
def test_a_job_that_is_told_to_stop_stops_and_leaves_nothing(
    script: str, args: tuple[str, ...], tmp_path: Path
) -> None:
    job = start(
        "rally", script, tmp_path / "out", "--shutdown-timeout", "60", args=args, mode="stop"
    )
    workers = [psutil.Process(pid) for pid in job.workers()]
    everything = psutil.Process(job.process.pid).children(recursive=True)
    job.process.send_signal(signal.SIGTERM)
    done = job.ends()
    assert done.code == 128 + signal.SIGTERM, done.stderr
    assert "the job failed" not in done.stderr
    assert set(workers) <= set(everything)
    assert not [each for each in everything if each.is_running()]


@parameters({"accelerate_session.py": "accelerate", "fabric_session.py": "lightning"})
def test_sessions_of_frameworks_end_as_without_losses(
    tmp_path: Path, script: str, args: tuple[str, ...]
) -> None:
    calm = run("rally", script, tmp_path / "calm", args=args)
    hurt = run("rally", script, tmp_path / "hurt", mode="kill", args=args)
    assert (calm.code, hurt.code) == (0, 0), hurt.stderr
    assert len(list((tmp_path / "hurt").glob("killed *"))) == 4
    assert hurt.told == calm.told and len(calm.told) == 2
