"""In a worker: record what it does for some seconds with torch's profiler, without the script's help.

The profiler is started and stopped in a thread of its own, and records all threads of the process: the main thread may be in a long call of
C code meanwhile. The thread begins when somebody asks, and ends with the recording.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from rallypoint._core import flight_records
from rallypoint.launch import torch_private


# Calls of each group whose times are told, to align the clocks of hosts.
_MOST_ENTERED = 500

_running = threading.Lock()


def start(request: dict[str, Any]) -> None:
    """Begin to record.

    Args:
        request: ``seconds``, ``path`` of the trace, ``answer``: a FIFO that takes a line of JSON at the end: ``why`` (it was not
            possible; empty if it was), whether it is ``whole``, and ``entered``.
    """
    torch_private.start_thread(_record, request)


def _record(request: dict[str, Any]) -> None:
    told: dict[str, Any] = {"why": "", "whole": True, "entered": []}
    if not _running.acquire(blocking=False):
        told["why"] = "it is being profiled already"
    else:
        try:
            told["whole"] = torch_private.profile(request["path"], float(request["seconds"]))
            dumps, ranks = torch_private.flight_records(calls=True), torch_private.group_ranks()
            told["entered"] = flight_records.entered(dumps, ranks, _MOST_ENTERED)
        except Exception as error:  # noqa: BLE001  whatever the profiler raises is told, and nobody else's
            told["why"] = str(error).partition("\n")[0] or type(error).__name__
        finally:
            _running.release()
    try:
        with open(os.open(request["answer"], os.O_WRONLY | os.O_NONBLOCK), "w") as answer:
            os.set_blocking(answer.fileno(), True)
            answer.write(json.dumps(told) + "\n")
    except OSError:
        pass  # who asked has gone
