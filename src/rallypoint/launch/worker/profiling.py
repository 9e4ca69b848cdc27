"""In a worker: record what it does for some seconds with torch's profiler, without the script's help.

The profiler is started and stopped in a thread of its own, because the main thread may be in a long call of C code
meanwhile, and records all threads of the process. The thread starts on request, and ends with the recording.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from rallypoint._core import flight_records
from rallypoint.launch import torch_private


# The most calls, in all groups together, whose times are reported, to align the hosts' clocks.
_MOST_ENTERED = 500

_running = threading.Lock()


def start(request: dict[str, Any]) -> None:
    """Start recording.

    Args:
        request: ``seconds``, the trace's ``path``, and ``answer``: a FIFO that takes a line of JSON at the end, with ``why`` (it
            was not possible; empty if it was), ``whole`` (whether the trace is) and ``entered``.
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
        pass  # whoever asked has gone
