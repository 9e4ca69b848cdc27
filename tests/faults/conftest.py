"""Jobs to break on purpose, and the hunt for what is left of them.

The test process makes itself a subreaper, so it adopts whatever a job orphans. A job's processes are
therefore found in two ways: by walking down from here, and by a mark that they inherit in their
environment. A daemon escapes neither by forking twice nor by clearing its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

import supervisors
from rallypoint._core import process
from stub_torch import STUB


SCRIPTS = Path(__file__).parent / "scripts"
RALLY = (sys.executable, "-m", "rallypoint", "run")
MARK = "RALLY_TEST_JOB"
# Seconds from a kill until the job's last process has exited. A quiet machine takes milliseconds.
# Less than the default time between SIGTERM and SIGKILL, and long enough for a machine that is busy with other things.
GONE_WITHIN = 20.0


def wait_until(condition, timeout: float = 120.0, what: str = "condition"):
    """The first true value of ``condition()``."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout:g} s: {what}")


class Job:
    """One `rally run` whose workers, from ``scripts``, note in ``folder`` what they do."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        script: str = "worker.py",
        worker: tuple[str, ...] = (),
        through: tuple[str, ...] = (),
        **popen,
    ) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.before = set(process.descendants(os.getpid()))
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        env |= {MARK: self.mark, "WORKER_NOTES": str(folder), **popen.pop("env", {})}
        if "--no-torch" in worker:
            env["PYTHONPATH"] = str(STUB)
        command = [*through, *RALLY, *words]
        if "--no-python" not in words:
            command += [str(SCRIPTS / script), *worker]
        self.stderr_path = folder / "rally-stderr"
        with self.stderr_path.open("wb") as stderr:
            self.popen = supervisors.Popen(
                command, **{"env": env, "stdout": subprocess.DEVNULL, "stderr": stderr, **popen}
            )

    # -- processes -----------------------------------------------------------------------------

    def alive(self) -> dict[int, str]:
        """Every running process of the job: pid and command line."""
        pids = set(process.descendants(os.getpid(), keep=supervisors.kept())) - self.before
        pids |= set(process.marked_processes(f"{MARK}={self.mark}".encode(), exclude=()))
        return {pid: _command_line(pid) for pid in sorted(pids)}

    @property
    def supervisor(self) -> int:
        return self.popen.pid

    def server(self) -> int:
        """The fork server: the supervisor's only child."""
        return wait_until(lambda: process.children(self.supervisor), what="a fork server")[0]

    def store(self) -> int:
        server = self.server()
        return wait_until(
            lambda: [
                pid
                for pid in process.children(server)
                if _command_line(pid).startswith("rally: store")
                or "store_host" in _command_line(pid)
            ],
            what="a process that serves the store",
        )[0]

    def notes(self, pattern: str) -> dict[str, str]:
        found = sorted(self.folder.glob(pattern))
        return {path.name: path.read_text() for path in found}

    def wait_for(self, pattern: str, count: int, timeout: float = 120.0) -> dict[str, str]:
        """Wait for ``count`` notes of this name. Returns their names and texts."""

        def enough():
            if self.popen.poll() is not None:
                raise AssertionError(f"rally ended with {self.popen.returncode}:\n{self.stderr()}")
            notes = self.notes(pattern)
            return notes if len(notes) >= count and all(notes.values()) else None

        return wait_until(enough, timeout, f"{count} notes {pattern}")

    def workers(self, count: int, generation: int = 0) -> list[int]:
        """Pids of the workers, by rank, once all of them are in their loop of collectives."""
        return [int(text) for text in self.wait_for(f"loop.{generation}.*", count).values()]

    # -- the end -------------------------------------------------------------------------------------

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def end(self, timeout: float = 120.0) -> int:
        """Wait for the command's exit code."""
        return self.popen.wait(timeout)

    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def assert_nothing_left(self, within: float = GONE_WITHIN) -> None:
        try:
            wait_until(lambda: not self.alive(), within, "every process of the job gone")
        except AssertionError:
            raise AssertionError(f"left after {within:g} s: {self.alive()}") from None

    def clean_up(self) -> None:
        left = self.alive()
        process.send(left, signal.SIGKILL)
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        for pid in process.children(os.getpid()):
            if pid not in self.before | supervisors.kept():
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    pass  # another adopted it first


def _command_line(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return ""


@pytest.fixture
def start(tmp_path):
    """``start(*flags, worker=(…))`` starts a job; nothing of it may be left at the end of the test."""
    was_subreaper = process.is_subreaper()
    process.set_subreaper(True)
    jobs: list[Job] = []

    def start_job(*words: str, **options) -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(folder, *words, **options))
        return jobs[-1]

    try:
        yield start_job
        for job in jobs:
            assert not job.alive() or job.popen.poll() is None, "left behind"
    finally:
        for job in jobs:
            job.clean_up()
        process.set_subreaper(was_subreaper)
