"""Which ranks `rally top` shows when there is no room for all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, strategies as st

from rallypoint.control.tables.top_screen import _parted
from rallypoint.control.tables.top_view import View


STATUS = {
    "id": "llm",
    "state": "running",
    "world_size": 4,
    "nodes": 1,
    "generation": 0,
    "restarts": 0,
    "max_restarts": 0,
    "replaced": 0,
    "seconds": 3.0,
}


def view(count: int) -> View:
    used = [
        {
            "rank": rank,
            "host": "h",
            "pid": 100 + rank,
            "cpu": 1.0,
            "at": 1.0,
            "memory": 1 << 20,
            "read": 0,
            "written": 0,
            "threads": 1,
            "children": 0,
            "state": "S",
            "collectives": None,
            "progress": None,
            "slowness": None,
        }
        for rank in range(count)
    ]
    job: Any = SimpleNamespace(status=lambda: STATUS, usage=lambda: used)
    made = View(job, "rank")
    made.look()
    return made


@given(st.integers(0, 40), st.integers(4, 50), st.lists(st.sampled_from([-1, 1]), max_size=60))
def test_the_chosen_rank_is_always_shown(count: int, room: int, moves: list[int]) -> None:
    shown = view(count)
    place: int | None = None
    for by in moves:
        shown.choose(by)
        if count:
            first = 0 if by > 0 else count - 1
            place = first if place is None else (place + by) % count
    assert shown.chosen == place
    lines = shown.lines(80, room)
    assert len(lines) <= room
    assert len(lines) == min(count + 2, room)
    _, marked = shown.marks(room)
    if place is None:
        assert marked is None
    else:
        assert marked is not None
        assert lines[marked].split()[0] == str(place)
    if count + 2 > room:
        assert lines[-1].startswith(f"({count + 3 - room} more ranks")


def test_a_rank_that_is_gone_is_no_choice() -> None:
    shown = view(3)
    shown.chosen = 7
    assert shown.marks(10)[1] is None
    shown.choose(1)
    assert shown.chosen == 0


def test_keys_of_several_characters_are_one() -> None:
    assert _parted("s\x1b[A\x1bOBq\x1b") == ["s", "\x1b[A", "\x1bOB", "q", "\x1b"]
    assert _parted("\x1b[1;5Ax") == ["\x1b[1;5A", "x"]
