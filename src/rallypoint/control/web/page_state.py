"""What the page of ``rally web`` shows about a job, from its status and its workers' usage. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rallypoint.control.tables.worker_table import Row


# A worker that uses less than this percentage of a core counts as waiting.
BUSY = 20.0
# A rank is odd if it is more steps behind than this. Ranks of a job are in the same step or the next, but reports are a bit old.
MANY_STEPS = 10


def cells(status: Mapping[str, Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A cell of the grid for each rank on all nodes.

    Returns:
        What the table of ``rally top`` has, and ``colour``: ``starting``, ``busy``, ``waiting``, ``odd``, ``stopped``,
        ``stuck``, ``hung`` or ``ended``.
    """
    own = {each["rank"]: each for each in status["workers"]}
    rows = [_behind(row, [each.step for each in rows if each.step is not None]) for row in rows]
    found = [
        {**asdict(row), "colour": colour(row, str(own.get(row.rank, {}).get("state", "running")))}
        for row in rows
    ]
    known = {row.rank for row in rows}
    for rank, worker in own.items():
        if rank not in known:
            is_ended = worker["state"] == "ended"
            found.append(
                {
                    "rank": rank,
                    "host": status["host"],
                    "pid": worker["pid"],
                    "remark": worker["state"],
                    "colour": "ended" if is_ended else "starting",
                }
            )
    return sorted(found, key=lambda cell: int(cell["rank"]))


def _behind(row: Row, steps: Sequence[int]) -> Row:
    """The same row, with a remark if the others are many steps ahead."""
    if row.step is None or row.remark:
        return row
    usual = sorted(steps)[len(steps) // 2]
    behind = usual - row.step
    return row if behind <= MANY_STEPS else replace(row, remark=f"{behind} steps behind")


def colour(row: Row, state: str) -> str:
    """The state of a worker as one word.

    Args:
        row: what it uses.
        state: its state as its supervisor reports it.
    """
    if state in {"hung", "ended", "starting"}:
        return state
    match row.state:
        case "T" | "t":
            return "stopped"
        case "D":
            return "stuck"
        case "Z" | "":
            return "ended"
        case _ if row.remark:
            return "odd"
        case _ if row.cpu is not None and row.cpu < BUSY:
            return "waiting"
        case _:
            return "busy"
