"""What the system reports about a worker, from /proc, /sys and its control group. The worker need not cooperate."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rallypoint._core import clock

from .differences import Surroundings


_TICKS: Final = os.sysconf("SC_CLK_TCK")
_GROUPS: Final = Path("/sys/fs/cgroup")
_CPUS: Final = Path("/sys/devices/system/cpu")
_NODES: Final = Path("/sys/devices/system/node")
# Neighbours that use less of a core than this are left out, and at most this many are named.
_BUSY, _MOST_BUSY = 0.05, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """A worker's counters up to now; times in seconds."""

    at: float
    ran: float
    waited_for_cpu: float
    throttled: float
    waited_for_memory: float
    waited_for_disk: float
    faults: int
    swapped: int
    nice: int
    cpus: tuple[int, ...]
    group: str


def counters(pid: int) -> Counters | None:
    """A process's counters; None if it is gone."""
    try:
        fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        status = dict(
            line.split(":\t", 1)
            for line in _text(f"/proc/{pid}/status").splitlines()
            if ":\t" in line
        )
        ran, waited, _ = _schedule(pid)
        groups = _text(f"/proc/{pid}/cgroup").splitlines()
        return Counters(
            at=clock.MONOTONIC.now(),
            ran=ran,
            waited_for_cpu=waited,
            throttled=_throttled(groups),
            waited_for_memory=_memory_pressure(groups),
            waited_for_disk=int(fields[39]) / _TICKS,
            faults=int(fields[9]),
            swapped=int(status.get("VmSwap", "0").split()[0]) * 1024,
            nice=int(fields[16]),
            cpus=tuple(_numbers(status.get("Cpus_allowed_list", ""))),
            group=_group_of(groups),
        )
    except (OSError, IndexError, ValueError):
        return None


def between(first: Counters, second: Counters) -> Surroundings:
    """What happened between two readings of the counters."""
    passed = max(1e-3, second.at - first.at)

    def share(before: float, after: float) -> float:
        return min(1.0, max(0.0, (after - before) / passed))

    return Surroundings(
        cpu=share(first.ran, second.ran),
        cpu_wait=share(first.waited_for_cpu, second.waited_for_cpu),
        throttled=share(first.throttled, second.throttled),
        memory_pressure=share(first.waited_for_memory, second.waited_for_memory),
        disk_wait=share(first.waited_for_disk, second.waited_for_disk),
        faults=max(0, second.faults - first.faults) / passed,
        swapped=second.swapped,
        nice=second.nice,
        cpus=second.cpus,
        group=second.group,
        clock=_clock(second.cpus),
    )


def with_memory(pid: int, found: Surroundings) -> Surroundings:
    """Add where its memory is. The kernel walks all its pages for this, so call it rarely."""
    nodes = _numbers_in(_NODES / "online")
    if len(nodes) < 2:
        return found
    near = {
        node
        for node in nodes
        if set(_numbers_in(_NODES / f"node{node}" / "cpulist")) & set(found.cpus)
    }
    if not near or near == set(nodes):
        return found
    pages: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for node, count in re.findall(r" N(\d+)=(\d+)", _text(f"/proc/{pid}/numa_maps")):
            pages[int(node)] = pages.get(int(node), 0) + int(count)
    far = sum(count for node, count in pages.items() if node not in near)
    return replace(found, remote=far / (sum(pages.values()) or 1))


def running() -> dict[int, float]:
    """Every process's CPU time so far, in seconds, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = _text(f"/proc/{name}/stat").rpartition(")")[2].split()
                found[int(name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def neighbours(
    cpus: Collection[int],
    own: Collection[int],
    before: dict[int, float],
    after: dict[int, float],
    seconds: float,
) -> str:
    """Other processes that ran on these CPUs meanwhile, in words: ``stress (pid 77, 98 % of a core)``.

    Args:
        cpus: the CPUs.
        own: pids to leave out.
        before, after: two results of :func:`running`.
        seconds: the time between the two.
    """
    busy = sorted(
        (
            ((after[pid] - before[pid]) / seconds, pid)
            for pid in after.keys() & before.keys()
            if pid not in own and after[pid] - before[pid] > _BUSY * seconds
        ),
        reverse=True,
    )
    told: list[str] = []
    for share, pid in busy:
        with contextlib.suppress(OSError, IndexError, ValueError):
            core = int(_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[36])
            name = _text(f"/proc/{pid}/comm").strip()
            if core in cpus and len(told) < _MOST_BUSY:
                told.append(f"{name} (pid {pid}, {share:.0%} of a core)")
    return ", ".join(told)


def _schedule(pid: int) -> tuple[float, float, int]:
    """For the main thread: seconds it ran, seconds it was runnable without a CPU, and the number of its time slices."""
    try:
        ran, waited, slices = _text(f"/proc/{pid}/schedstat").split()
    except (FileNotFoundError, ValueError):  # a kernel without CONFIG_SCHED_INFO
        return 0.0, 0.0, 0
    return int(ran) / 1e9, int(waited) / 1e9, int(slices)


def _group_of(groups: Sequence[str]) -> str:
    """The path of the control group that limits CPU time."""
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") and path != "/":
            return path
    return next((line[3:] for line in groups if line.startswith("0::") and line != "0::/"), "")


def _throttled(groups: Sequence[str]) -> float:
    for path in _folders(groups, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            told = dict(line.split() for line in _text(path / "cpu.stat").splitlines())
            if "throttled_usec" in told:
                return int(told["throttled_usec"]) / 1e6
            return int(told.get("throttled_time", 0)) / 1e9
    return 0.0


def _memory_pressure(groups: Sequence[str]) -> float:
    for path in _folders(groups, "memory"):
        with contextlib.suppress(OSError):
            if found := re.search(
                r"^full .*total=(\d+)", _text(path / "memory.pressure"), re.MULTILINE
            ):
                return int(found[1]) / 1e6
    return 0.0


def _folders(groups: Sequence[str], controller: str) -> list[Path]:
    """Where a control group's files may be: in this controller's own tree, or in the unified one."""
    found = []
    for line in groups:
        number, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controller in controllers.split(","):
            found.append(_GROUPS / controllers / relative)
            found.append(_GROUPS / controller / relative)
        elif number == "0":
            found.append(_GROUPS / relative)
    return found


def _clock(cpus: Sequence[int]) -> float:
    """The mean frequency of these CPUs, in MHz; 0 if unknown."""
    found = []
    for each in cpus:
        with contextlib.suppress(OSError, ValueError):
            found.append(int(_text(_CPUS / f"cpu{each}" / "cpufreq" / "scaling_cur_freq")) / 1000)
    return sum(found) / len(found) if found else 0.0


def _numbers_in(path: Path) -> list[int]:
    try:
        return _numbers(_text(path))
    except (OSError, ValueError):
        return []


def _numbers(text: str) -> list[int]:
    """``0-3,8`` as numbers."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _text(path: str | Path) -> str:
    with open(path, errors="replace") as file:
        return file.read()
