"""What the page of ``rally web`` shows of a job: from its status and what its workers use. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rallypoint.control.tables.worker_table import Row


# A worker that uses less than this much of a core (percent) waits.
BUSY = 20.0
# Ranks of one job are in the same step, or in the next one; reports are a moment old.
MANY_STEPS = 10


def cells(status: Mapping[str, Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A cell of the grid for each rank of all nodes.

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
    """The same, with a remark if the others are some steps ahead."""
    if row.step is None or row.remark:
        return row
    usual = sorted(steps)[len(steps) // 2]
    behind = usual - row.step
    return row if behind <= MANY_STEPS else replace(row, remark=f"{behind} steps behind")


def colour(row: Row, state: str) -> str:
    """The state of a worker as one word.

    Args:
        row: what it uses.
        state: what its supervisor says of it.
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
