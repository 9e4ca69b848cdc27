"""Jobs as a table for people (``rally ps``). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import step_words
from .quantities import duration


_HEAD = ("JOB", "PID", "HOST", "SINCE", "NODE", "RANKS", "GEN", "RESTARTS", "STATE", "COMMAND")
_HOST = _HEAD.index("HOST")
# The longest command that is shown in full.
_COMMAND = 60


@dataclass(frozen=True, slots=True)
class Row:
    """A supervisor of a job.

    Args:
        name: the job's name.
        pid: the supervisor's pid; None: unknown.
        told: its status, or why there is none.
        host: where it runs; empty: here.
        node: the node's rank and the number of nodes, if there is no status.
    """

    name: str
    pid: int | None
    told: Mapping[str, Any] | str
    host: str = ""
    node: str = ""


def table(supervisors: Sequence[Row]) -> str:
    """A header, and a line for each supervisor. There is a column of hosts if any row names one."""
    rows = [_HEAD, *map(_cells, supervisors)]
    if not any(each.host for each in supervisors):
        rows = [(*row[:_HOST], *row[_HOST + 1 :]) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    told, pid = row.told, "-" if row.pid is None else str(row.pid)
    if isinstance(told, str):
        return (row.name, pid, row.host, "", row.node, "", "", "", told, "")
    workers = told["workers"]
    alive = sum(each["state"] == "running" for each in workers)
    node = "-" if told["node_rank"] is None else f"{told['node_rank']} of {told['nodes']}"
    ranks = "-"
    if told["world_size"]:
        where = "there" if row.host else "here"
        ranks = f"{alive} of {told['world_size']}" if told["nodes"] == 1 else f"{alive} {where}"
    if spares := told.get("spares"):
        waiting = sum(each["state"] == "waiting" for each in spares)
        ranks += f", {waiting} of {len(spares)} spares"
    words = " ".join([str(told["target"]), *map(str, told["args"])])
    return (
        row.name,
        pid,
        row.host,
        duration(float(told["seconds"])),
        node,
        ranks,
        "-" if told["generation"] is None else str(told["generation"]),
        f"{told['restarts']} of {told['max_restarts']}",
        _state(told),
        words if len(words) <= _COMMAND else words[: _COMMAND - 1] + "…",
    )


def _state(told: Mapping[str, Any]) -> str:
    progress = told.get("progress")
    if progress is None or told["state"] != "running":
        return str(told["state"])
    return f"running, {step_words.short(progress)}"
