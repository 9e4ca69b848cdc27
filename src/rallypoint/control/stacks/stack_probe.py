"""Reads the stacks of processes that cannot cooperate: stuck in C code, in a collective, with the GIL held.

py-spy is tried first, if it is installed. It reads a process's memory, so it works even for a stopped process, but not where
containers forbid ptrace.

A worker has a handler for :data:`~rallypoint._core.stack_line.STACK_SIGNAL` that is not Python code (faulthandler). It writes
the stacks of all threads to a pipe, whatever the interpreter is doing. The worker's forked children inherit it. Interrupted
system calls are restarted, except those that the kernel never restarts: ``sleep`` or ``poll`` in C code may return early.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint._core import process
from rallypoint._core.clock import Deadline
from rallypoint._core.stack_line import STACK_SIGNAL
from rallypoint.control.collectives import collective_probe
from rallypoint.control.line_lock import LINES

from . import stack_records
from .stack_records import Thread


# A process's output has no end mark. It is complete when none has come for this long and no thread is in the handler any more.
_SILENCE = 0.05
# How long a process may take to start writing. The handler needs nothing but a core; a process that waits for one gets longer.
_BEGIN = 1.0
_READERS = 8
# How long py-spy may take for a process that seems stuck in the kernel.
_STUCK = 1.0
_STATES = {
    "T": "it is stopped (SIGSTOP); kill -CONT continues it",
    "t": "a debugger has stopped it",
    "D": "it is stuck in the kernel (state D): a disk or network file system does not answer",
    "Z": "it has ended",
    "": "it has ended",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A worker to read the stacks of, with its children.

    Args:
        rank: its rank.
        pid: its pid.
        fd: the read end of its pipe for stacks; closed by :func:`look`, as the next one is.
        questions: the socket on which it is asked about its collectives.
    """

    rank: int
    pid: int
    fd: int
    questions: int


def look(
    targets: Sequence[Target], *, native: bool, by_signal: bool, patience: float
) -> list[dict[str, Any]]:
    """The stacks of workers and of their children. Blocks.

    Args:
        targets: the workers.
        native: include C frames, from py-spy.
        by_signal: do not use py-spy.
        patience: seconds for all of them together.
    Returns:
        For each process: ``rank``, ``pid``, ``name`` (of a child; empty for a worker), ``threads`` (``name`` and
        ``frames``: ``file``, ``line``, ``function``; the main thread first), and ``why`` there are none. For workers also
        ``collectives`` (:func:`rallypoint._core.flight_records.compact`), None if the worker did not report them.
    Raises:
        ValueError: ``native``, and py-spy is not installed.
    """
    py_spy = None if by_signal else find_py_spy()
    if native and py_spy is None:
        for each in targets:
            _close(each)
        raise ValueError("native stacks need py-spy: pip install py-spy")
    told = collective_probe.collectives({each.pid: each.questions for each in targets})
    with LINES, ThreadPoolExecutor(_READERS, thread_name_prefix="rally-stacks") as readers:
        deadline = Deadline(patience)
        found = readers.map(lambda each: _of_worker(each, native, py_spy, deadline), targets)
        records = [record for records in found for record in records]
    for record in records:
        if not record["name"]:
            record["collectives"] = told.get(record["pid"])
    return records


def _of_worker(
    target: Target, native: bool, py_spy: str | None, deadline: Deadline
) -> list[dict[str, Any]]:
    try:
        records = [_of_process(target, target.pid, "", native, py_spy, deadline)]
        for pid in process.descendants(target.pid):
            name = _name(pid)
            # Children that run other programs have no handler; those that run the worker's Python code do.
            if process.catches(pid, STACK_SIGNAL):
                records.append(_of_process(target, pid, name, native, py_spy, deadline))
        return records
    finally:
        _close(target)


def _close(target: Target) -> None:
    os.close(target.fd)
    os.close(target.questions)


def _of_process(
    target: Target, pid: int, name: str, native: bool, py_spy: str | None, deadline: Deadline
) -> dict[str, Any]:
    threads: list[Thread] = []
    why = ""
    if py_spy is not None:
        threads, why = _by_py_spy(py_spy, pid, native, deadline)
    if not threads and not native:
        threads = _by_signal(pid, target.fd, deadline)
        why = "" if threads else why
    if not threads:
        why = _STATES.get(process.state(pid)) or why or _why_silent(pid, py_spy)
    return {"rank": target.rank, "pid": pid, "name": name, "threads": threads, "why": why}


def _by_signal(pid: int, fd: int, deadline: Deadline) -> list[Thread]:
    _drain(fd)  # an answer that came too late for an earlier question
    # The signal would kill a process that is still starting, or that has executed another program.
    if not process.catches(pid, STACK_SIGNAL) or process.state(pid) in "TtZ":
        return []
    blocking = process.blocking(pid, STACK_SIGNAL)
    try:
        os.kill(pid, STACK_SIGNAL)
    except OSError:
        return []
    begin = Deadline(_BEGIN)
    received = bytearray()
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while not deadline.expired():
        if poller.poll(min(_SILENCE, deadline.remaining() or 0.0) * 1000):
            data = _read(fd)
            if not data:
                break
            received += data
        elif process.blocking(pid, STACK_SIGNAL) - blocking:
            continue  # a thread is in the handler
        elif received or (begin.expired() and not _waits_for_core(pid, blocking)):
            break
    return stack_records.from_faulthandler(received.decode(errors="replace"))


def _waits_for_core(pid: int, blocking: frozenset[int]) -> bool:
    """Whether the signal has woken the main thread, which now only needs a core."""
    return (
        pid not in blocking and process.is_pending(pid, STACK_SIGNAL) and process.state(pid) == "R"
    )


def _drain(fd: int) -> None:
    while _read(fd):
        pass


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # there is nothing to read, or it has ended
        return b""


def find_py_spy() -> str | None:
    """The path of py-spy, from ``PATH`` or beside the interpreter; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.exists() else None)


def _by_py_spy(
    program: str, pid: int, native: bool, deadline: Deadline
) -> tuple[list[Thread], str]:
    # py-spy would wait for a process that is stuck in the kernel.
    longest = _STUCK if process.state(pid) == "D" else (deadline.remaining() or 0.0)
    words = [program, "dump", "--json", "--pid", str(pid), *(["--native"] if native else [])]
    try:
        ran = subprocess.run(
            words,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=max(0.1, min(longest, deadline.remaining() or 0.0)),
            check=False,
        )
        if ran.returncode == 0:
            return stack_records.from_py_spy(ran.stdout), ""
        reason = ran.stderr.strip().splitlines()
        return [], f"py-spy: {reason[0] if reason else 'it failed'}"
    except subprocess.TimeoutExpired:
        return [], "py-spy did not end in time"
    except (OSError, ValueError) as error:
        return [], f"py-spy: {error}"


def _why_silent(pid: int, py_spy: str | None) -> str:
    more = "" if py_spy else "; py-spy, if it is installed, may show it"
    if not process.catches(pid, STACK_SIGNAL):
        return f"it is starting, or does not run Python code of ours{more}"
    return f"it did not answer; it may block signals{more}"


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() or "process"
    except OSError:
        return "process"
