"""Jobs as a table for people (``rally ps``). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import step_words
from .quantities import duration


_HEAD = ("JOB", "PID", "SINCE", "NODE", "RANKS", "GEN", "RESTARTS", "STATE", "COMMAND")
# Columns that end where the terminal does.
_COMMAND = 60


def table(jobs: Sequence[tuple[str, int, Mapping[str, Any] | str]]) -> str:
    """A row for each job.

    Args:
        jobs: its name for one that has told no status, the supervisor's pid, and its status or why it has told none.
    """
    rows = [_HEAD, *(_row(*each) for each in jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def _row(name: str, pid: int, told: Mapping[str, Any] | str) -> tuple[str, ...]:
    if isinstance(told, str):
        return (name, str(pid), "", "", "", "", "", told, "")
    workers = told["workers"]
    alive = sum(each["state"] == "running" for each in workers)
    node = "-" if told["node_rank"] is None else f"{told['node_rank']} of {told['nodes']}"
    ranks = "-"
    if told["world_size"]:
        ranks = f"{alive} of {told['world_size']}" if told["nodes"] == 1 else f"{alive} here"
    if spares := told.get("spares"):
        waiting = sum(each["state"] == "waiting" for each in spares)
        ranks += f", {waiting} of {len(spares)} spares"
    words = " ".join([str(told["target"]), *map(str, told["args"])])
    return (
        str(told["id"]),
        str(pid),
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
