"""What the control groups of this process allow: its own and those above it, in version 2 or 1 of the interface.

A limit may be anywhere on the way up: systemd sets it on a user's slice, Slurm on the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available_memory() -> int | None:
    """Bytes that may still be used; None: there is no limit."""
    found = [*_left("", "memory.max", "memory.current", ""), *_left_by_version_1()]
    return min(found, default=None)


def cpu_quota() -> float | None:
    """CPUs that may be used at a time; None: there is no limit."""
    found = []
    for group in _groups(""):
        words = _read(group / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            found.append(int(words[0]) / int(words[1]))
    for group in _groups("cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            found.append(quota / period)
    return min(found, default=None)


def _left_by_version_1() -> Iterator[int]:
    yield from _left("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _left(controller: str, limit: str, used: str, prefix: str) -> Iterator[int]:
    for group in _groups(controller):
        most, now = _number(group / limit), _number(group / used)
        if most is None or now is None:
            continue
        # The page cache counts as used, and fills a container up to its limit; it is freed when memory is needed.
        stat = _numbers(group / "memory.stat")
        cache = sum(stat.get(f"{prefix}{each}", 0) for each in ("inactive_file", "active_file"))
        yield max(0, most - max(0, now - cache))


def _groups(controller: str) -> list[Path]:
    """The control group of this process, and those above it.

    Args:
        controller: one of version 1; empty for version 2.
    """
    own = ""
    for line in _read(_OWN).splitlines():
        _, controllers, name = line.split(":", 2)
        if controller in controllers.split(","):
            own = name
    base = _ROOT / controller
    path = base / own.lstrip("/")
    # In a container without a cgroup namespace of its own, the path is the host's, and only the last of these exists.
    return [path, *(each for each in path.parents if each == base or base in each.parents)]


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or no limit."""
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _numbers(path: Path) -> dict[str, int]:
    """A file that has a name and a number on each line."""
    pairs = (line.partition(" ") for line in _read(path).splitlines())
    return {name: int(number) for name, _, number in pairs if number.isdigit()}


def _read(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
