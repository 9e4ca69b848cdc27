"""What /proc says of a process in one line."""

from __future__ import annotations


def fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the name before it may contain any character); none if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def started(pid: int) -> int:
    """When a process started, in clock ticks since the host did; 0 if it is gone."""
    found = fields(pid)
    return int(found[19]) if found else 0
