"""What a job's workers use, as a table for people (``rally top``). Odd workers are marked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .quantities import digits, duration


# A rank whose CPU use differs from the median by more than this is marked. In percent of one core.
ODD_CPU = 40.0
# The same for memory, as a factor.
ODD_MEMORY = 1.5
# The same for GPUs, in percent of the time.
ODD_GPU = 40.0
_HEAD = (
    "RANK",
    "HOST",
    "PID",
    "CPU%",
    "MEM",
    "GPU%",
    "GPUMEM",
    "STEP",
    "it/s",
    "THR",
    "CHILD",
    "READ/s",
    "WRITE/s",
    "COLL/s",
    "WAIT%",
    "",
)
_LEFT = {1, len(_HEAD) - 1}
# The columns that a narrow terminal drops, the least important first. Rank and remark stay.
_DROPPED = (
    *("PID", "CHILD", "THR", "HOST", "WRITE/s", "READ/s", "COLL/s", "it/s"),
    *("WAIT%", "GPUMEM", "STEP", "MEM", "GPU%", "CPU%"),
)
_GAP = "  "
# How many characters of a job's id suffice to recognize it.
_SHORT_ID = 8
SORTS = {"rank": "RANK", "cpu": "CPU%", "memory": "MEM", "gpu": "GPU%"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A worker between two looks.

    Args:
        rank, host, pid: the worker's.
        cpu: percent of one core, with its children; None at the first look.
        memory: resident bytes, with its children.
        gpu: percent of the time in which its busiest GPU is busy; None if it uses no GPU, or this is unknown.
        gpu_memory: bytes on GPUs, with its children.
        threads, children: how many.
        read, written: bytes per second from and to storage; None at the first look.
        collectives: per second, in a session; None otherwise.
        step: the step it reports; None if it reports none.
        steps: recent steps per second; None if unknown.
        late: seconds since its last step, if that is unusual; None otherwise.
        behind: in a session, how many collectives it is behind the rank that has started the most.
        waits: percent of its time in which it waits for others; None if unknown.
        slow: if it is slow, percent of the others' time in which they wait for it; None otherwise.
        state: the process's state, as in /proc.
        remark: what is odd about it; empty if nothing is.
    """

    rank: int
    host: str
    pid: int
    cpu: float | None
    memory: int
    gpu: float | None
    gpu_memory: int | None
    threads: int
    children: int
    read: float | None
    written: float | None
    collectives: float | None
    step: int | None
    steps: float | None
    late: float | None
    behind: int
    waits: float | None
    slow: float | None
    state: str
    remark: str = ""


def rows(now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]] = ()) -> list[Row]:
    """Rows from the answers to ``usage``, now and at the previous look.

    A time is only ever compared with one from the same host.
    """
    last = {(each["rank"], each["pid"]): each for each in before}
    most = max((each["collectives"] or 0 for each in now), default=0)
    found = [_row(each, last.get((each["rank"], each["pid"])), most) for each in now]
    cpus = [each.cpu for each in found if each.cpu is not None]
    usual_cpu = _median(cpus) if len(cpus) > 2 else None
    usual_memory = _median([each.memory for each in found]) if len(found) > 2 else None
    gpus = [each.gpu for each in found if each.gpu is not None]
    usual_gpu = _median(gpus) if len(gpus) > 2 else None
    return [_marked(each, usual_cpu, usual_memory, usual_gpu) for each in found]


def _median(values: Sequence[float]) -> float:
    """The median; of two middle values, the upper. (Importing :mod:`statistics` takes longer than this command runs.)"""
    return sorted(values)[len(values) // 2]


def _row(now: Mapping[str, Any], before: Mapping[str, Any] | None, most: int) -> Row:
    def rate(key: str) -> float | None:
        if before is None or now[key] is None or before[key] is None:
            return None
        passed = now["at"] - before["at"]
        # A child that has ended takes its numbers with it.
        return max(0.0, (now[key] - before[key]) / passed) if passed > 0 else None

    cpu = rate("cpu")
    progress = now.get("progress") or {}
    slowness = now.get("slowness") or {}
    return Row(
        rank=now["rank"],
        host=str(now["host"]),
        pid=now["pid"],
        cpu=None if cpu is None else cpu * 100,
        memory=now["memory"],
        gpu=now.get("gpu"),
        gpu_memory=now.get("gpu_memory"),
        threads=now["threads"],
        children=now["children"],
        read=rate("read"),
        written=rate("written"),
        collectives=rate("collectives"),
        step=progress.get("step"),
        steps=progress.get("rate"),
        late=progress["seconds_ago"] if progress.get("late") else None,
        behind=_behind(now, before, most),
        waits=100 * slowness["waits"] if slowness else None,
        slow=100 * slowness["late"] if slowness.get("slow") else None,
        state=str(now["state"]),
    )


def _behind(now: Mapping[str, Any], before: Mapping[str, Any] | None, most: int) -> int:
    """How many fewer collectives a rank has started than the rank with the most.

    0 unless its count stands still: ranks are in different groups, and nodes are asked at different times.
    """
    count = now["collectives"]
    stands = before is not None and count == before["collectives"]
    return most - count if count is not None and stands else 0


def _marked(
    row: Row, usual_cpu: float | None, usual_memory: float | None, usual_gpu: float | None
) -> Row:
    remarks = []
    if row.state in {"T", "t"}:
        remarks.append("stopped")
    if row.state == "D":
        remarks.append("stuck in the kernel")
    if row.state in {"Z", ""}:
        remarks.append("ended")
    if row.behind > 1:
        remarks.append(f"{row.behind} collectives behind")
    if row.slow is not None:
        remarks.append(f"slow: the others wait for it {row.slow:.0f} % of the time")
    if row.late is not None:
        remarks.append(f"no step for {duration(row.late)}")
    if usual_cpu is not None and row.cpu is not None and abs(row.cpu - usual_cpu) > ODD_CPU:
        remarks.append("busier than the others" if row.cpu > usual_cpu else "idler than the others")
    if usual_gpu is not None and row.gpu is not None and abs(row.gpu - usual_gpu) > ODD_GPU:
        compared = "busier" if row.gpu > usual_gpu else "idler"
        remarks.append(f"its GPU is {compared} than the others'")
    if usual_memory and row.memory > ODD_MEMORY * usual_memory:
        remarks.append(f"{row.memory / usual_memory:.1f} times the others' memory")
    return replace(row, remark=", ".join(remarks))


def ordered(found: Sequence[Row], by: str) -> list[Row]:
    """The rows sorted by ``by``, a key of :data:`SORTS`: largest first, but ranks from 0 up."""
    match by:
        case "cpu":
            return sorted(found, key=lambda row: -(row.cpu or 0.0))
        case "memory":
            return sorted(found, key=lambda row: -row.memory)
        case "gpu":
            return sorted(found, key=lambda row: -(row.gpu or 0.0))
        case _:
            return sorted(found, key=lambda row: row.rank)


def title(told: Mapping[str, Any], width: int) -> str:
    """The line above the table, at most ``width`` long. A long id is shortened so that the job's state fits."""
    nodes = "" if told["nodes"] < 2 else f", {told['nodes']} nodes"
    rest = (
        f": {told['state']}, {told['world_size']} ranks{nodes}, generation {told['generation']},"
        f" {told['restarts']} of {told['max_restarts']} restarts, {duration(told['seconds'])}"
    )
    name = str(told["id"])
    if len(name) + len(rest) > width and len(name) > _SHORT_ID + 1:
        name = f"{name[:_SHORT_ID]}…"
    return f"{name}{rest}"[:width]


def lines(found: Sequence[Row], width: int) -> list[str]:
    """The table: a header, and a line per row, none longer than ``width``.

    Columns that no row has are left out, and then those for which there is no room.
    """
    cells = [_HEAD, *(_cells(each) for each in found)]
    shown = [
        column
        for column in range(len(_HEAD))
        if column < 5 or any(row[column] not in {"", "-", "0"} for row in cells[1:])
    ]
    widths = {column: max(len(row[column]) for row in cells) for column in shown}
    for name in _DROPPED:
        if sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= width:
            break
        widths.pop(_HEAD.index(name), None)
    made = []
    for row in cells:
        parts = [
            row[column].ljust(widths[column])
            if column in _LEFT
            else row[column].rjust(widths[column])
            for column in widths
        ]
        made.append(_GAP.join(parts).rstrip()[:width])
    return made


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.rank),
        row.host,
        str(row.pid),
        "-" if row.cpu is None else f"{row.cpu:.0f}",
        size(row.memory),
        "-" if row.gpu is None else f"{row.gpu:.0f}",
        "-" if row.gpu_memory is None else size(row.gpu_memory),
        "-" if row.step is None else str(row.step),
        "-" if row.steps is None else digits(row.steps),
        str(row.threads),
        str(row.children),
        "-" if not row.read else size(row.read),
        "-" if not row.written else size(row.written),
        "-" if row.collectives is None else f"{row.collectives:.1f}",
        "-" if row.waits is None else f"{row.waits:.0f}",
        row.remark,
    )


def size(number: float) -> str:
    """``512B``, ``3.4M``, ``12G``."""
    for unit in ("B", "K", "M", "G", "T"):
        if number < 1024 or unit == "T":
            return f"{number:.1f}{unit}" if number < 10 and unit != "B" else f"{number:.0f}{unit}"
        number /= 1024
    raise AssertionError(number)
