"""Asks workers which collectives they have started. Their :mod:`rallypoint.launch.worker.collective_thread` answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
from collections.abc import Mapping
from typing import Any

from rallypoint._core import flight_records, process
from rallypoint._core.clock import Deadline
from rallypoint._core.stack_line import (
    ASK_BEGUN,
    ASK_COLLECTIVES,
    ASK_DEVICES,
    ASK_ENTERED,
    ASK_PLACE,
    THREAD,
    TO,
    question,
)
from rallypoint.control.line_lock import LINES


_numbers = itertools.count(1)  # of questions


def collectives(lines: Mapping[int, int], patience: float = 0.5) -> dict[int, list[Any]]:
    """The collectives that workers have started in their process groups. Blocks for at most ``patience`` seconds.

    Args:
        lines: by pid, the supervisor's end of the worker's line.

    Returns:
        By pid, what :func:`rallypoint._core.flight_records.compact` returns. A worker that has no group yet, is stopped, or
        holds the GIL in C code is left out.
    """
    told = _ask(lines, ASK_COLLECTIVES, patience)
    found = {pid: answer.get("collectives") for pid, answer in told.items()}
    return {pid: groups for pid, groups in found.items() if flight_records.are_valid(groups)}  # type: ignore[misc]


def begun(lines: Mapping[int, int], patience: float) -> dict[int, int]:
    """How many collectives workers have started in all groups together, by pid. Otherwise like :func:`collectives`."""
    told = _ask(lines, ASK_BEGUN, patience)
    found = {pid: answer.get("begun") for pid, answer in told.items()}
    return {pid: number for pid, number in found.items() if isinstance(number, int)}


def entered(lines: Mapping[int, int], patience: float) -> dict[int, list[Any]]:
    """When workers entered their last collectives, by pid (:func:`rallypoint._core.flight_records.entered`). Otherwise like
    :func:`collectives`."""
    told = _ask(lines, ASK_ENTERED, patience)
    found = {pid: answer.get("entered") for pid, answer in told.items()}
    return {pid: groups for pid, groups in found.items() if flight_records.are_entered(groups)}  # type: ignore[misc]


def places(lines: Mapping[int, int], patience: float) -> dict[int, str]:
    """Where workers' main threads are in the script's own code, by pid, in words. Otherwise like :func:`collectives`."""
    told = _ask(lines, ASK_PLACE, patience)
    found = {pid: answer.get("place") for pid, answer in told.items()}
    return {pid: place for pid, place in found.items() if isinstance(place, str) and place}


def devices(lines: Mapping[int, int], patience: float) -> dict[int, list[dict[str, Any]]]:
    """What torch's allocator holds on workers' devices, by pid. Otherwise like :func:`collectives`."""
    told = _ask(lines, ASK_DEVICES, patience)
    found = {pid: answer.get("devices") for pid, answer in told.items()}
    return {pid: each for pid, each in found.items() if isinstance(each, list)}


def _ask(lines: Mapping[int, int], kind: bytes, patience: float) -> dict[int, dict[str, Any]]:
    deadline = Deadline(patience)
    if not LINES.acquire(timeout=patience):
        return {}
    try:
        number = next(_numbers)
        found: dict[int, dict[str, Any]] = {}
        waiting: dict[int, tuple[int, bytearray]] = {}
        poller = select.poll()
        for pid, fd in lines.items():
            if not process.has_thread(pid, THREAD):
                continue
            while _read(fd):
                pass  # an answer that came too late for an earlier question
            with contextlib.suppress(OSError):
                os.write(fd, question(kind, number))
                waiting[fd] = pid, bytearray()
                poller.register(fd, select.POLLIN)
        while waiting and (ready := poller.poll((deadline.remaining() or 0.0) * 1000)):
            for fd, _ in ready:
                pid, received = waiting[fd]
                data = _read(fd)
                received += data
                answer = _answer_to(number, received)
                if data and answer is None:
                    continue
                poller.unregister(fd)
                del waiting[fd]
                if answer is not None:
                    found[pid] = answer
        return found
    finally:
        LINES.release()


def _answer_to(number: int, received: bytearray) -> dict[str, Any] | None:
    """The answer to this question, if it has come. Removes the lines that have come whole."""
    *lines, rest = received.split(b"\n")
    received[:] = rest
    for line in lines:
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and answer.get(TO) == number:
                return answer
    return None


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # there is nothing to read, or it has ended
        return b""
