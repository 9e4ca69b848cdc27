"""What a process and its children use: CPU time, memory, threads, bytes read and written, from /proc; and GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rallypoint._core import process

from .gpus import GPUS


_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def of_workers(pids: Iterable[int], gpu_patience: float | None = None) -> dict[int, dict[str, Any]]:
    """By pid, what each of these processes uses with all its descendants.

    Args:
        pids: the processes.
        gpu_patience: how many seconds GPUs may take to answer (:meth:`.Gpus.used_soon`); None: no limit.
    Returns:
        What :func:`usage` returns, and ``gpu`` and ``gpu_memory`` as in :meth:`.Gpus.used`; both None without GPUs.
    """
    families = {pid: (pid, *process.descendants(pid)) for pid in pids}
    asked = {pid: frozenset(family) for pid, family in families.items()}
    of_gpus = GPUS.used(asked) if gpu_patience is None else GPUS.used_soon(asked, gpu_patience)
    none = {"gpu": None, "gpu_memory": None}
    return {pid: {**_used_by(family), **of_gpus.get(pid, none)} for pid, family in families.items()}


def usage(pid: int) -> dict[str, Any]:
    """What a process uses with all its descendants.

    Args:
        pid: the process.
    Returns:
        ``cpu`` (seconds so far), ``memory`` (resident bytes), ``threads``, ``children``, ``read`` and ``written`` (bytes
        from and to storage), ``state`` (of the process itself: R, S, D, T, Z; empty if it is gone), ``core`` (the CPU
        that it ran on last).
    """
    return _used_by((pid, *process.descendants(pid)))


def _used_by(family: tuple[int, ...]) -> dict[str, Any]:
    """What a family uses: a process, which comes first, and its descendants."""
    found = {"cpu": 0.0, "memory": 0, "threads": 0, "children": -1, "read": 0, "written": 0}
    told: dict[str, Any] = {**found, "state": "", "core": -1}
    for each in family:
        try:
            fields = (
                Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()
            )
            pages = int(Path(f"/proc/{each}/statm").read_text(errors="replace").split()[1])
            moved = _moved(each)
        except (OSError, IndexError, ValueError):
            continue  # it has ended
        if each == family[0]:
            told["state"], told["core"] = fields[0], int(fields[36])
        # Includes the time of children that have ended, which must not vanish with them.
        told["cpu"] += sum(map(int, fields[11:15])) / _TICKS
        told["threads"] += int(fields[17])
        told["memory"] += pages * _PAGE
        told["read"] += moved[0]
        told["written"] += moved[1]
        told["children"] += 1
    told["children"] = max(0, told["children"])
    return told


def _moved(pid: int) -> tuple[int, int]:
    try:
        text = Path(f"/proc/{pid}/io").read_text(errors="replace")
    except (PermissionError, FileNotFoundError):  # another user's, or no such file
        return 0, 0
    values = dict(line.split(": ") for line in text.splitlines())
    return int(values["read_bytes"]), int(values["write_bytes"])
