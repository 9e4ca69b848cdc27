"""What the page of `rally web` shows of a job."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.control.tables import worker_table
from rallypoint.control.web import page_state
from rallypoint.launch.watching.job_history import MOST, JobHistory


def usage(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "pid": 100 + rank,
        "host": "ada",
        "cpu": 0.0,
        "memory": 1 << 30,
        "threads": 4,
        "children": 0,
        "read": 0,
        "written": 0,
        "state": "S",
        "core": 0,
        "collectives": None,
        "progress": None,
        "at": 0.0,
        **more,
    }


def rows(*now: dict[str, Any]) -> list[worker_table.Row]:
    before = [{**each, "at": -1.0, "cpu": each["cpu"] - each.pop("busy", 0.5)} for each in now]
    return worker_table.rows(list(now), before)


def status(*states: str) -> dict[str, Any]:
    workers = [
        {"rank": rank, "pid": 100 + rank, "state": state} for rank, state in enumerate(states)
    ]
    return {"host": "ada", "workers": workers}


@pytest.mark.parametrize(
    ("told", "state", "colour"),
    [
        ({}, "running", "busy"),
        ({"busy": 0.01}, "running", "waiting"),
        ({"state": "T"}, "running", "stopped"),
        ({"state": "D"}, "running", "stuck"),
        ({"state": "Z"}, "running", "ended"),
        ({}, "hung", "hung"),
        ({}, "ended", "ended"),
        ({}, "starting", "starting"),
    ],
)
def test_the_colour_of_a_rank(told: dict[str, Any], state: str, colour: str) -> None:
    (cell,) = page_state.cells(status(state), rows(usage(0, **told)))
    assert cell["colour"] == colour


def test_a_rank_that_is_steps_behind_is_odd() -> None:
    steps = (100, 99, 61, 101)
    told = [usage(rank, progress={"step": step}) for rank, step in enumerate(steps)]
    cells = page_state.cells(status(*["running"] * 4), rows(*told))
    assert [each["colour"] for each in cells] == ["busy", "busy", "odd", "busy"]
    assert cells[2]["remark"] == "39 steps behind"


def test_ranks_of_other_nodes_and_those_that_use_nothing_yet() -> None:
    cells = page_state.cells(status("starting", "ended"), rows(usage(2)))
    assert [(each["rank"], each["colour"]) for each in cells] == [
        (0, "starting"),
        (1, "ended"),
        (2, "busy"),
    ]


def test_generations_are_remembered_but_not_for_ever() -> None:
    history = JobHistory()
    history.end(0.0, [], "")  # before the first generation
    for number in range(MOST + 5):
        history.begin(number, float(number), 8)
        history.end(number + 0.5, [3] if number % 2 else [], "ValueError" if number % 2 else "")
    history.begin(MOST + 5, 200.0, 6)
    told = history.told()
    assert len(told) == MOST
    assert told[-1] == {
        "generation": MOST + 5,
        "began": 200.0,
        "world_size": 6,
        "ended": None,
        "failed_ranks": (),
        "cause": "",
    }
    assert told[-2]["ended"] == MOST + 4.5
