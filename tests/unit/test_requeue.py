"""`--requeue-on`: what is requested from Slurm, and what is said when Slurm refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.launch.command_line.given import parse
from rallypoint.launch.command_line.settings import config_from
from rallypoint.launch.command_line.values import exit_codes
from rallypoint.launch.placement import requeue


@given(st.sets(st.integers(1, 255), min_size=1))
def test_codes_are_read(codes: set[int]) -> None:
    assert exit_codes(", ".join(map(str, codes)), "--requeue-on") == codes


@pytest.mark.parametrize("text", ["0", "256", "-1", "TERM", "1,,2", "", "٣", "1-5", "7 8"])
def test_other_words_are_no_codes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--requeue-on .*expected exit codes from 1 to 255"):
        exit_codes(text, "--requeue-on")


class Slurm:
    """Slurm's two commands, which record how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        self.state("RUNNING")
        self.command("scontrol", "")

    def command(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.folder}/asked\n{body}\n')
        path.chmod(0o755)

    def state(self, name: str) -> None:
        self.command("squeue", f"echo {name}")

    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()

    def requeue(self, **more: Any) -> str:
        said: list[str] = []
        requeue.requeue(75, {**self.env, **more}, said.append, is_first=True)
        return "\n".join(said)


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def test_a_running_job_is_requeued(slurm: Slurm) -> None:
    assert slurm.requeue() == "exit code 75: Slurm's job 7 is requeued"
    assert slurm.asked() == ["squeue --noheader --jobs=7 --format=%T", "scontrol requeue 7"]
    told = slurm.requeue(SLURM_RESTART_COUNT="3")
    assert told == "exit code 75: Slurm's job 7 is requeued (requeued 3 times so far)"


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "TIMEOUT", ""])
def test_a_job_that_slurm_ends_is_left_alone(slurm: Slurm, state: str) -> None:
    slurm.state(state)
    assert f"is {state or 'gone'}, so it is not requeued" in slurm.requeue()
    assert len(slurm.asked()) == 1


def test_what_slurm_refuses_is_said(slurm: Slurm) -> None:
    slurm.command("scontrol", "echo Requested operation is presently disabled >&2; exit 1")
    assert "cannot be requeued: Requested operation is presently disabled" in slurm.requeue()
    slurm.command("squeue", "exit 3")
    assert "cannot be requeued: Command" in slurm.requeue()
    (slurm.folder / "squeue").unlink()
    assert "cannot be requeued: " in slurm.requeue(PATH="/nowhere")


def test_another_node_than_the_first_waits_for_slurm_to_end_it(slurm: Slurm, monkeypatch) -> None:
    monkeypatch.setattr(requeue, "_TURN", 0.05)
    said: list[str] = []
    requeue.requeue(75, slurm.env, said.append, is_first=False)
    assert said == ["exit code 75: Slurm's job 7 is requeued"], "the first one was lost"


def test_the_flag_needs_slurm(slurm: Slurm, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    line = parse(["--requeue-on", "75,143", "x.py"])
    made, _ = config_from(line, slurm.env)
    assert made.requeue_on == {75, 143}
    assert config_from(parse(["x.py"]), slurm.env)[0].requeue_on == frozenset()
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set"):
        config_from(line, {"PATH": slurm.env["PATH"]})
    (tmp_path / "scontrol").unlink()
    with pytest.raises(ConfigError, match="scontrol is not on the PATH"):
        config_from(line, {**slurm.env, "PATH": str(tmp_path)})
