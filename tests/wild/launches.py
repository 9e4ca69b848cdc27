"""Starting a script of ``scripts/`` under a launcher, as a person would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


SCRIPTS = Path(__file__).parent / "scripts"
# The longest that one job may take (seconds); most finish in ten on an idle machine.
PATIENCE = 300.0
LAUNCHERS = {
    "rally": [sys.executable, "-m", "rallypoint", "run"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


@dataclass(frozen=True)
class Job:
    """One launch.

    Args:
        out: where its scripts leave what they have to report.
        process: the launcher.
    """

    out: Path
    process: subprocess.Popen[str]

    def ends(self) -> Done:
        """Wait for it."""
        try:
            stdout, stderr = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            stop(self.process)
            raise
        return Done(self.process.returncode, stdout, stderr, told(self.out))

    def workers(self) -> list[int]:
        """The workers' process ids, once both are in the middle of their training."""
        deadline = time.monotonic() + PATIENCE
        files = [self.out / f"{rank}.pid" for rank in range(2)]
        # Written by another program, which cannot tell us otherwise.
        while not all(file.exists() and file.read_text() for file in files):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, "the workers did not begin"
            time.sleep(0.05)
        return [int(file.read_text()) for file in files]


@dataclass(frozen=True)
class Done:
    """How it ended, and what its workers told, by rank."""

    code: int
    stdout: str
    stderr: str
    told: list[dict[str, Any]]


def start(
    launcher: str,
    script: str,
    out: Path,
    *flags: str,
    mode: str = "train",
    args: tuple[str, ...] = (),
    module: bool = False,
) -> Job:
    out.mkdir(parents=True)
    target = ["-m", script] if module else [str(SCRIPTS / script)]
    command = [*LAUNCHERS[launcher], "--nproc-per-node", "2", *flags, *target, *args]
    env = os.environ | {
        "PYTHONPATH": str(SCRIPTS),
        "WILD_OUT": str(out),
        "WILD_MODE": mode,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "400",
    }
    pipe = subprocess.PIPE
    return Job(out, subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))


def run(launcher: str, script: str, out: Path, *flags: str, **more: Any) -> Done:
    return start(launcher, script, out, *flags, **more).ends()


def told(out: Path) -> list[dict[str, Any]]:
    files = sorted(out.glob("[0-9].json"))
    return [json.loads(file.read_text()) for file in files]


def stop(process: subprocess.Popen[str]) -> None:
    for each in [
        *psutil.Process(process.pid).children(recursive=True),
        psutil.Process(process.pid),
    ]:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass
    process.communicate()
