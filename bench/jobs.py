"""Shared by the benchmarks: a description of the machine, medians, progress, and the processes of a job."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


BIN = Path(sys.executable).parent
RALLY = [str(BIN / "rally"), "run"]
TORCHRUN = [str(BIN / "torchrun")]

MARK = "RALLY_BENCH_JOB"


# -- figures --------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Enough to know which other machine's figures these may be compared with."""
    import torch

    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "ram_gib": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerator": torch.accelerator.is_available(),
        "load_at_start": os.getloadavg()[0],
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def spread(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Count, median and range of some measurements."""
    if not values:
        return {"n": 0, "median": None, "min": None, "max": None}
    return {
        "n": len(values),
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def ratio(a: dict[str, Any], b: dict[str, Any]) -> float | None:
    """The ratio of two medians; None if one of them is missing."""
    if not a.get("median") or not b.get("median"):
        return None
    return round(a["median"] / b["median"], 3)


def publish(result: dict[str, Any], output: Path | None) -> int:
    """Print the result, and write it to ``output``. Returns how many promises do not hold, and names each on stderr."""
    text = json.dumps(result, indent=1)
    print(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
    missed = [row["what"] for row in result.get("targets", ()) if row["holds"] is False]
    for what in missed:
        print(f"missed: {what}", file=sys.stderr)
    return len(missed)


class Progress:
    """A bar on terminals, lines elsewhere; on stderr, so that stdout is only JSON."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import (
                    BarColumn,
                    MofNCompleteColumn,
                    Progress as Bar,
                    TextColumn,
                    TimeElapsedColumn,
                    TimeRemainingColumn,
                )
            except ImportError:
                return
            self._bar = Bar(
                TextColumn("{task.description:<44}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("", total=total)
            self._bar.start()

    def step(self, what: str) -> None:
        """``what`` starts."""
        if self._bar is None:
            print(f"[{self._done + 1}/{self._total}] {what}", file=sys.stderr, flush=True)
        else:
            self._bar.update(self._task, completed=self._done, description=what)
        self._done += 1

    def close(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._total, description="done")
            self._bar.stop()


# -- processes ------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Make this process a subreaper: a job's orphans become its children."""
    pr_set_child_subreaper = 36
    if ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")


class Job:
    """A running launcher, with a mark that identifies all its processes.

    Processes are found in two ways: by the mark in their environment, and by walking down from this
    process (:func:`adopt_orphans`), which finds those that have cleared their environment too.
    """

    def __init__(self, command: Sequence[str], folder: Path, **env: str) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self._before = {os.getpid(), *_tree(os.getpid())}
        inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self.stderr = folder / "stderr"
        with self.stderr.open("wb") as stderr:
            self.began = time.monotonic()
            self.popen = subprocess.Popen(
                command,
                env={**inherited, MARK: self.mark, "NOTES": str(folder), **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )

    def alive(self) -> list[int]:
        """Running processes of the job."""
        marked = {pid for pid in _all_pids() if self._is_marked(pid)}
        below = set(_tree(os.getpid())) - self._before
        return sorted(pid for pid in marked | below if _state(pid) not in "ZX")

    def _is_marked(self, pid: int) -> bool:
        try:
            data = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return f"{MARK}={self.mark}".encode() in data.split(b"\0")

    def notes(self, pattern: str) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.glob(pattern)}

    def wait_for_notes(self, pattern: str, count: int, timeout: float) -> dict[str, str] | None:
        """``count`` files of this name, or None if they do not appear in time or the launcher exits."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = self.notes(pattern)
            if len(found) >= count:
                return found
            if self.popen.poll() is not None:
                return None
            time.sleep(0.005)
        return None

    def wait(self, timeout: float) -> int | None:
        """The exit code; None if it does not exit in time."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def clean_up(self) -> None:
        """Kill what is left, by pid; a benchmark must not disturb the next one."""
        for _ in range(20):
            left = self.alive()
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if not left:
                break
            time.sleep(0.05)
        self.popen.wait()
        for pid in _children().get(os.getpid(), []):
            if pid not in self._before:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    pass


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    return _children().get(pid, [])


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for pid in _all_pids():
        found.setdefault(int(_stat(pid)[1]), []).append(pid)
    return found


def _tree(root: int) -> list[int]:
    below, by_parent = [], _children()
    queue = [root]
    while queue:
        for child in by_parent.get(queue.pop(), []):
            below.append(child)
            queue.append(child)
    return below


@contextmanager
def job(command: Sequence[str], folder: Path, **env: str) -> Iterator[Job]:
    """A job that is gone when the block ends, however it ends."""
    folder.mkdir(parents=True)
    running = Job(command, folder, **env)
    try:
        yield running
    finally:
        running.clean_up()
