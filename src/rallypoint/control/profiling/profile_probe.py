"""Records what workers do for some seconds: with torch's profiler inside them, or with py-spy from outside.

A thread of the worker is told where to write its trace, and the FIFO on which to report completion. The script need do nothing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint._core import flight_records, host, linux, process
from rallypoint._core.clock import Deadline
from rallypoint._core.stack_line import PROFILE, THREAD
from rallypoint.control.stacks.stack_probe import find_py_spy


# How long a worker may take to write its trace, and py-spy to start and stop.
WRITING = 55.0
# Samples per second.
RATE = 100
# The most bytes of compressed traces that a node sends to another one. They pass through the job's store.
MAX_SENT = 600_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What to record.

    Args:
        seconds: how long.
        sampling: use py-spy.
        native: include C frames, with py-spy.
        folder: where the traces go; None: another node asks, so they go into the answer.
    """

    seconds: float
    sampling: bool
    native: bool
    folder: str | None


def look(workers: Mapping[int, tuple[int, int]], wanted: Recording) -> list[dict[str, Any]]:
    """Record workers. Blocks for the requested time, and until the traces are written.

    Args:
        workers: by rank, the pid and the supervisor's end of the worker's line, which is closed here.
        wanted: what to record.
    Returns:
        For each worker: ``rank``, ``pid``, ``trace`` (the path of the file; empty if there is none, or it is in ``packed``),
        ``packed`` (the trace, compressed), ``why`` there is none, ``entered`` (when it entered its last collectives),
        ``whole`` (false if the script cut the recording short by starting torch's profiler) and
        ``clock`` (the clock of its times, :func:`rallypoint._core.host.clock_identity`).
    """
    own = None
    try:
        folder = wanted.folder
        if folder is None:
            folder = own = tempfile.mkdtemp(prefix="rally-profile-")
        record = _by_py_spy if wanted.sampling else _by_torch
        with ThreadPoolExecutor(max(1, len(workers)), thread_name_prefix="rally-profile") as pool:
            clock = host.clock_identity()
            found = [
                {**each, "clock": clock}
                for each in pool.map(
                    lambda rank: record(rank, *workers[rank], folder, wanted), workers
                )
            ]
        return found if own is None else _packed(found)
    finally:
        for _, fd in workers.values():
            os.close(fd)
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _nothing(rank: int, pid: int) -> dict[str, Any]:
    """A worker's record before anything is known."""
    nothing = {"trace": "", "packed": "", "why": "", "entered": [], "whole": True}
    return {"rank": rank, "pid": pid, **nothing}


def _by_torch(rank: int, pid: int, line: int, folder: str, wanted: Recording) -> dict[str, Any]:
    trace = f"{folder}/rank-{rank}.json"
    found = _nothing(rank, pid)
    if not process.has_thread(pid, THREAD):
        why = "it has no process group, so no thread that could start torch's profiler (--sampling needs none)"
        return {**found, "why": why}
    fifo = f"{folder}/rank-{rank}.fifo"
    os.mkfifo(fifo, 0o600)
    request = {"seconds": wanted.seconds, "path": trace, "answer": fifo}
    with contextlib.ExitStack() as stack:
        answer = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, answer)
        try:
            pidfd = linux.pidfd_open(pid)
            stack.callback(os.close, pidfd)
            os.write(line, PROFILE + json.dumps(request).encode() + b"\n")
        except OSError:
            return {**found, "why": "it has ended"}
        told = _answer(answer, pidfd, Deadline(wanted.seconds + WRITING))
    if not told:
        state = process.state(pid)
        why = "it is stopped (SIGSTOP)" if state in {"T", "t"} else "it did not answer in time"
        return {**found, "why": "it has ended" if state in {"", "Z"} else why}
    entered = told.get("entered")
    if flight_records.are_entered(entered):
        found["entered"] = entered
    found["whole"] = told.get("whole") is not False
    why = str(told.get("why", ""))
    return {**found, "why": why, "trace": "" if why else trace}


def _answer(fifo: int, pidfd: int, deadline: Deadline) -> dict[str, Any]:
    """The answer that arrives through the FIFO; empty if none does."""
    poller = select.poll()
    poller.register(fifo, select.POLLIN)
    poller.register(pidfd, select.POLLIN)
    received = bytearray()
    while not received.endswith(b"\n"):
        ready = dict(poller.poll((deadline.remaining() or 0.0) * 1000))
        if fifo not in ready:
            return {}  # the time is up, or the worker has ended
        data = os.read(fifo, 1 << 16)
        if not data:
            return {}
        received += data
    told = json.loads(received)
    return told if isinstance(told, dict) else {}


def _by_py_spy(rank: int, pid: int, _line: int, folder: str, wanted: Recording) -> dict[str, Any]:
    trace = f"{folder}/rank-{rank}.json"
    found = _nothing(rank, pid)
    program = find_py_spy()
    if program is None:
        return {**found, "why": "sampling needs py-spy: pip install py-spy"}
    words = [program, "record", "--pid", str(pid), "--format", "speedscope", "--output", trace]
    words += ["--duration", str(max(1, round(wanted.seconds))), "--rate", str(RATE)]
    words += ["--subprocesses", *(["--native"] if wanted.native else [])]
    try:
        ran = subprocess.run(
            words,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=wanted.seconds + WRITING,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**found, "why": "py-spy did not end in time"}
    except OSError as error:
        return {**found, "why": f"py-spy: {error}"}
    if not os.path.exists(trace):
        lines = (ran.stderr or ran.stdout).strip().splitlines()
        return {**found, "why": f"py-spy: {lines[0] if lines else 'it failed'}"}
    return {**found, "trace": trace}


def _packed(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with the traces themselves, for a node that cannot read the files."""
    room = MAX_SENT
    sent = []
    for each in found:
        if not each["trace"]:
            sent.append(each)
            continue
        packed = base64.b64encode(zlib.compress(Path(each["trace"]).read_bytes())).decode()
        changed = {**each, "trace": "", "packed": packed}
        if len(packed) > room:
            size = f"{len(packed) / (1 << 20):.1f} MiB"
            why = f"its trace is too large to be sent to another node ({size}): ask on its host, with --here"
            changed = {**changed, "packed": "", "why": why}
        room -= len(changed["packed"])
        sent.append(changed)
    return sent


def unpacked(packed: str, most: int = 1 << 30) -> bytes:
    """The trace in ``packed``.

    Raises:
        ValueError: it is not a packed trace, is cut off, or has more than ``most`` bytes.
    """
    decompressor = zlib.decompressobj()
    try:
        trace = decompressor.decompress(base64.b64decode(packed), most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(trace) > most:
        room = f"{most / (1 << 20):g} MiB"
        raise ValueError(f"it has more than {room}: record less, or use --here on its host")
    if not decompressor.eof:
        raise ValueError("it is cut off")
    return trace
