"""Detect the kernel's OOM killer by the counters of cgroup v1 and v2 and of the machine.

A process killed for memory looks like any SIGKILL. The kernel counts its kills per memory cgroup
(v2: ``memory.events``, v1: ``memory.oom_control``) and for the machine (``/proc/vmstat``); a counter
that rose while the job ran is the evidence. The machine's counts other containers' processes, too, so it matters only where no
cgroup's can be read. A worker whose child was killed has raised an exception that says only that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


# What DataLoaders, the pools of concurrent.futures and joblib, multiprocessing.spawn of torch, and subprocess say about a process of theirs
# that was killed.
_KILLED_CHILD = re.compile(
    r"DataLoader worker .*(exited unexpectedly|killed by signal: Killed)"
    r"|(terminated abruptly while the future|managed by the executor was unexpectedly terminated)"
    r"|terminated with signal SIGKILL|died with <Signals\.SIGKILL"
)


@dataclass(frozen=True, slots=True)
class OomCounters:
    """OOM kills so far: per counter file of our cgroup and its ancestors, and on the machine (None: unknown)."""

    groups: Mapping[str, int]
    machine: int | None


def read_counters(
    proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> OomCounters:
    """Read the counters. Never raises: unreadable ones are left out."""
    groups: dict[str, int] = {}
    for line in _read(proc / "self/cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0":
            roots = [cgroup_root, cgroup_root / "unified"]
            name = "memory.events"
        elif "memory" in controllers.split(","):
            roots = [cgroup_root / "memory"]
            name = "memory.oom_control"
        else:
            continue
        for root in roots:
            # The limit may be an ancestor's, so walk up to the root of the hierarchy.
            relative = Path(path.lstrip("/"))
            for folder in (relative, *relative.parents):
                file = root / folder / name
                kills = _field(_read(file), "oom_kill")
                if kills is not None:
                    groups[str(file)] = kills
    return OomCounters(groups, _field(_read(proc / "vmstat"), "oom_kill"))


def tells_of_killed_child(message: str) -> bool:
    """Whether an exception's message says that a child was killed, or may have been."""
    return _KILLED_CHILD.search(message) is not None


def explain(before: OomCounters, after: OomCounters, *, victim: str = "") -> str | None:
    """A sentence if the OOM killer struck between the two readings, else None.

    Args:
        victim: what was killed, if the sentence is not about the process itself.
    """
    for file, kills in after.groups.items():
        if kills > before.groups.get(file, kills):
            killed = f"{victim} was killed" if victim else "killed"
            return f"{killed} by the kernel's OOM killer: memory limit of the cgroup ({file})"
    # They also count who was killed because the whole machine had no memory left.
    is_known = bool(before.groups.keys() & after.groups.keys())
    if is_known or before.machine is None or after.machine is None:
        return None
    if after.machine > before.machine:
        killed = f"{victim} was perhaps killed" if victim else "perhaps killed"
        return (
            f"{killed} by the kernel's OOM killer, which ended processes on this machine meanwhile"
        )
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return ""


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None
