"""Asking workers which collectives they have begun: a thread of theirs answers (:mod:`rallypoint.launch.worker.collective_thread`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Mapping
from typing import Any

from rallypoint._core import flight_records, process
from rallypoint._core.clock import Deadline
from rallypoint._core.stack_line import ASK_COLLECTIVES, THREAD


def collectives(lines: Mapping[int, int], patience: float = 0.5) -> dict[int, list[Any]]:
    """What workers have begun in their process groups. Blocks for ``patience`` seconds at the most.

    Args:
        lines: by pid, the supervisor's end of the worker's line.

    Returns:
        By pid, as :func:`rallypoint._core.flight_records.compact` returns it. A worker that has no group yet, is stopped, or
        holds the GIL in C code is left out.
    """
    found: dict[int, list[Any]] = {}
    waiting: dict[int, tuple[int, bytearray]] = {}
    poller = select.poll()
    for pid, fd in lines.items():
        if not process.has_thread(pid, THREAD):
            continue
        while _read(fd):
            pass  # what came too late for the last one who asked
        with contextlib.suppress(OSError):
            os.write(fd, ASK_COLLECTIVES)
            waiting[fd] = pid, bytearray()
            poller.register(fd, select.POLLIN)
    deadline = Deadline(patience)
    while waiting and (ready := poller.poll((deadline.remaining() or 0.0) * 1000)):
        for fd, _ in ready:
            pid, received = waiting[fd]
            data = _read(fd)
            received += data
            if data and not received.endswith(b"\n"):
                continue
            poller.unregister(fd)
            del waiting[fd]
            with contextlib.suppress(ValueError, TypeError, KeyError):
                groups = json.loads(received)["collectives"]
                if flight_records.are_valid(groups):
                    found[pid] = groups
    return found


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # nothing is there, or it has ended
        return b""
