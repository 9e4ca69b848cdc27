"""In a worker: reports the collectives this rank has started, from a thread when the supervisor asks, and with an exception.

A rank that waits in a collective runs no Python code in its main thread, and torch's records are in its memory. So another
thread reads them. It starts with the first process group, which has threads of its own anyway, and does nothing but wait for
questions. ``threading`` does not know about it. A rank that holds the GIL in C code does not answer.
"""

from __future__ import annotations

import json
import os
import re
import select
import threading
import time
import traceback
from typing import Any

from rallypoint._core import flight_records, stack_line
from rallypoint.launch import torch_private


# The most calls whose times are reported: an answer must fit into the line.
_MOST_ENTERED = 2000
# Calls that torch records. Dumping its own 2000 takes 11 MiB, which the process keeps, and stops the script for 35 ms.
_RECORDED = 200
# Seconds that the thread may take to start: it has to wait for a CPU, and for the GIL.
_START_PATIENCE = 5.0
# Installed packages, Python's own modules, and what starts a worker.
_NOT_THE_SCRIPT = re.compile(
    r"/(?:site-packages|dist-packages|lib/python3\.\d+)/|/rallypoint/(?:launch|elastic|join)/|^<"
)


def start(fd: int) -> None:
    """Start the thread, before there is a group. Returns once the thread has its name, which tells a supervisor
    that there is a thread to ask.

    Args:
        fd: where questions arrive and answers go.
    """
    torch_private.begin_flight_recorder(_RECORDED)
    named = threading.Event()
    torch_private.start_thread(_answer, fd, os.fstat(fd).st_ino, named)
    named.wait(_START_PATIENCE)


def records_of(error: BaseException) -> list[flight_records.Group]:
    """The collectives that this rank has started, when an exception ends it. Called in the main thread."""
    at = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not _NOT_THE_SCRIPT.search(frame.f_code.co_filename):
            at = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return _records(at)


def _answer(fd: int, inode: int, named: threading.Event) -> None:
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
            name.write(stack_line.THREAD)
    finally:
        named.set()
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while True:
        poller.poll()
        try:
            # A script that closes all descriptors may open another one under this number.
            if os.fstat(fd).st_ino != inode or not (asked := os.read(fd, 4096)):
                return
            asked, profile, rest = asked.partition(stack_line.PROFILE)
            if profile:
                request, _, more = rest.partition(b"\n")
                _profile(request)
                asked += more
            if not asked:
                continue
            answer: dict[str, object] = {stack_line.TO: stack_line.last_number(asked)}
            if stack_line.ASK_BEGUN in asked:
                answer["begun"] = _begun()
            if stack_line.ASK_COLLECTIVES in asked:
                answer["collectives"] = _records(_place())
            if stack_line.ASK_ENTERED in asked:
                answer["entered"] = _entered()
            if stack_line.ASK_PLACE in asked:
                answer["place"] = _place()
            if stack_line.ASK_DEVICES in asked:
                answer["devices"] = _devices()
            os.write(fd, json.dumps(answer).encode() + b"\n")
        except BlockingIOError:
            continue  # nobody reads
        except OSError:
            return


def _profile(request: bytes) -> None:
    from . import profiling

    try:
        profiling.start(json.loads(request))
    except (KeyError, TypeError, ValueError):
        pass  # it did not arrive whole; whoever asked is told that there is no answer


def _begun() -> int | None:
    try:
        return flight_records.begun(torch_private.flight_records(calls=False))
    except Exception:  # noqa: BLE001  as below
        return None


def _entered() -> list[flight_records.Entered]:
    try:
        dumps, ranks = torch_private.flight_records(calls=True), torch_private.group_ranks()
        return flight_records.entered(dumps, ranks, _MOST_ENTERED)
    except Exception:  # noqa: BLE001  as below
        return []


def _devices() -> list[dict[str, Any]]:
    from . import device_memory

    try:
        return device_memory.devices()
    except Exception:  # noqa: BLE001  as below
        return []


def _place() -> str:
    """Where the main thread is in the script's own code."""
    frame = torch_private.frame_of_main_thread()
    while frame is not None and _NOT_THE_SCRIPT.search(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _records(at: str) -> list[flight_records.Group]:
    try:
        dumps, ranks = torch_private.flight_records(calls=True), torch_private.group_ranks()
        return flight_records.compact(dumps, ranks, time.time_ns(), at)
    except Exception:  # noqa: BLE001  another torch may record in another way; stacks are told all the same
        return []
