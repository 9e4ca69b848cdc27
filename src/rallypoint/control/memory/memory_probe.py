"""Reads the memory of workers and their children: from /proc, and for devices from the workers themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rallypoint._core import process
from rallypoint.control.collectives import collective_probe

from . import mappings


# How long workers may take to report on their devices: they walk all blocks of the allocator.
PATIENCE = 3.0


def look(workers: Mapping[int, tuple[int, int]]) -> list[dict[str, Any]]:
    """The memory of workers and of their descendants. Blocks.

    Args:
        workers: by rank, the pid and the supervisor's end of the worker's line, which is closed here.
    Returns:
        For each process: ``rank``, ``pid``, ``name`` (of a child; empty for a worker), what :func:`.mappings.memory` returns,
        ``why`` that is unknown (or empty), and ``devices``: the memory of each device that a worker uses.
    """
    try:
        lines = dict(workers.values())
        told = collective_probe.devices(lines, PATIENCE)
    finally:
        for _, fd in workers.values():
            os.close(fd)
    found = []
    for rank, (pid, _) in workers.items():
        found.append(
            {"rank": rank, "pid": pid, "name": "", **_of(pid), "devices": told.get(pid, [])}
        )
        for child in process.descendants(pid):
            name = _name(child)
            if name:
                more = {"rank": rank, "pid": child, "name": name, "devices": []}
                found.append({**more, **_of(child)})
    return found


def _of(pid: int) -> dict[str, Any]:
    why = ""
    text = ""
    try:
        text = Path(f"/proc/{pid}/smaps").read_text(errors="replace")
    except PermissionError:
        why = "it runs as another user, or hides its memory"
    except (FileNotFoundError, ProcessLookupError):
        why = "it has ended"
    return {**mappings.memory(text), "why": why}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() or "process"
    except OSError:
        return ""
