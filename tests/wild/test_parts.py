"""Processes that workers start, and what else scripts in the wild do, under torchrun and under `rally run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from wild.launches import run


pytestmark = [pytest.mark.wild, pytest.mark.timeout(900)]


def belongs(process: psutil.Process, out: Path) -> bool:
    """Whether it was started, through whomever, by the job that writes there."""
    try:
        return process.environ().get("WILD_OUT") == str(out)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def test_loaders_spawned_children_and_compiled_models_work_in_workers(tmp_path: Path) -> None:
    ours = run("rally", "parts.py", tmp_path / "rally")
    left = [each for each in psutil.process_iter() if belongs(each, tmp_path / "rally")]
    theirs = run("torchrun", "parts.py", tmp_path / "torchrun")
    assert (ours.code, theirs.code) == (0, 0), ours.stderr + theirs.stderr
    assert len(ours.told) == 2 and ours.told == theirs.told
    assert left == []
    children = sorted(path.name for path in (tmp_path / "rally").glob("child-*"))
    assert children == ["child-0-0", "child-0-1", "child-1-0", "child-1-1"]


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    both = [
        run(launcher, "recorded", tmp_path / launcher, module=True, args=("--epochs", "3"))
        for launcher in ("rally", "torchrun")
    ]
    assert [each.code for each in both] == [0, 0], both[0].stderr + both[1].stderr
    assert both[0].told == both[1].told
    assert both[0].told[1]["argv"] == ["--epochs", "3"]


def test_accelerate_takes_the_group_of_a_function_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is missing: `make wild` installs it")
    script = Path(__file__).parent / "scripts" / "accelerate_function.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists()


def test_a_framework_may_be_imported_before_the_fork(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is missing: `make wild` installs it")
    plain = run("rally", "accelerate_loop.py", tmp_path / "plain")
    preloaded = run("rally", "accelerate_loop.py", tmp_path / "early", "--preload", "accelerate")
    assert (plain.code, preloaded.code) == (0, 0), plain.stderr + preloaded.stderr
    assert plain.told == preloaded.told
