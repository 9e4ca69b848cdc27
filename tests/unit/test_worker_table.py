"""What workers use, as a table."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from rallypoint.control.tables import worker_table


def told(rank: int, **more: Any) -> dict[str, Any]:
    usual = {
        "rank": rank,
        "pid": 100 + rank,
        "host": "h",
        "cpu": 1.0,
        "memory": 1 << 20,
        "threads": 2,
        "children": 0,
        "read": 0,
        "written": 0,
        "collectives": None,
        "state": "S",
        "at": 10.0,
    }
    return usual | more


def test_rates_are_between_two_looks_at_the_same_process() -> None:
    before = [told(0), told(1), told(2, pid=7)]
    now = [
        told(0, at=12.0, cpu=2.0, read=2048, collectives=None),
        told(1, at=14.0, cpu=1.0),
        told(2, at=12.0, cpu=9.0),  # another process has taken its place
    ]
    found = worker_table.rows(now, before)
    assert [each.cpu for each in found] == [50.0, 0.0, None]
    assert found[0].read == 1024.0


def test_who_moves_is_not_behind_however_many_the_others_have_begun() -> None:
    """They may be in more groups, or on a node that was asked a moment later."""
    before = [told(rank, collectives=1000 * (rank % 2)) for rank in range(4)]
    now = [told(rank, at=11.0, collectives=1000 * (rank % 2) + 10) for rank in range(4)]
    assert [each.remark for each in worker_table.rows(now, before)] == [""] * 4
    assert [each.remark for each in worker_table.rows(now)] == [""] * 4


def test_a_child_that_has_ended_makes_no_negative_rate() -> None:
    (row,) = worker_table.rows([told(0, at=11.0, cpu=0.5)], [told(0)])
    assert row.cpu == 0.0


def test_the_odd_ones_say_why() -> None:
    before = [told(rank, collectives=4) for rank in range(5)]
    now = [told(rank, at=11.0, cpu=1.9, collectives=9) for rank in range(5)]
    now[1] |= {"cpu": 1.0, "collectives": 4}
    now[2] |= {"state": "T"}
    now[3] |= {"memory": 2 << 20}
    now[4] |= {"state": "D", "collectives": 8}  # one behind: has not reached it yet
    assert [each.remark for each in worker_table.rows(now, before)] == [
        "",
        "5 collectives behind, idler than the others",
        "stopped",
        "2.0 times the others' memory",
        "stuck in the kernel",
    ]


def test_gpus_have_columns_and_an_order_where_there_are_some() -> None:
    now = [told(rank, gpu=95.0, gpu_memory=3 << 30) for rank in range(4)]
    now[2] |= {"gpu": 20.0}
    now[3] |= {"gpu": None, "gpu_memory": None}
    found = worker_table.rows(now)
    assert [each.remark for each in found] == ["", "", "its GPU is idler than the others'", ""]
    head, *table = worker_table.lines(found, 120)
    assert head.split()[4:7] == ["MEM", "GPU%", "GPUMEM"]
    assert [line.split()[5:7] for line in table[2:]] == [["20", "3.0G"], ["-", "-"]]
    assert [each.rank for each in worker_table.ordered(found, "gpu")] == [0, 1, 2, 3]
    assert "GPU" not in worker_table.lines(worker_table.rows([told(0)]), 120)[0]


def test_columns_that_nobody_has_are_left_out() -> None:
    head, line = worker_table.lines(worker_table.rows([told(3)]), 80)
    assert head.split() == ["RANK", "HOST", "PID", "CPU%", "MEM", "THR"]
    assert line.split() == ["3", "h", "103", "-", "1.0M", "2"]
    now, before = [told(3, at=11.0, collectives=7)], [told(3, collectives=5)]
    head, line = worker_table.lines(worker_table.rows(now, before), 80)
    assert head.split()[-1] == "COLL/s" and line.split()[-1] == "2.0"


def test_order() -> None:
    now = [told(2, memory=5), told(0, memory=3), told(1, memory=9)]
    found = worker_table.rows(now)
    assert [each.rank for each in worker_table.ordered(found, "rank")] == [0, 1, 2]
    assert [each.rank for each in worker_table.ordered(found, "memory")] == [1, 2, 0]


@given(st.integers(1, 200), st.integers(0, 20), st.integers(0, 1 << 50))
def test_no_line_is_longer_than_the_terminal(width: int, count: int, memory: int) -> None:
    now = [told(rank, memory=memory * rank, state="T") for rank in range(count)]
    made = worker_table.lines(worker_table.rows(now), width)
    assert len(made) == count + 1
    assert all(len(line) <= width for line in made)


def test_a_narrow_terminal_shows_rank_and_remark() -> None:
    before = [told(rank, collectives=4, read=0) for rank in range(3)]
    now = [told(rank, at=11.0, cpu=1.9, collectives=9, read=1 << 20) for rank in range(3)]
    now[1] |= {"state": "T", "collectives": 4}
    rows = worker_table.rows(now, before)
    remark = "stopped, 5 collectives behind"
    wide, *_ = worker_table.lines(rows, 200)
    assert wide.split() == ["RANK", "HOST", "PID", "CPU%", "MEM", "THR", "READ/s", "COLL/s"]
    for width, columns in (
        (76, ["RANK", "HOST", "CPU%", "MEM", "THR", "READ/s", "COLL/s"]),
        (50, ["RANK", "CPU%", "MEM"]),
        (41, ["RANK", "CPU%"]),
        (36, ["RANK"]),
    ):
        head, _, odd, _ = worker_table.lines(rows, width)
        assert head.split() == columns
        assert odd.split()[0] == "1" and odd.endswith(remark)


@given(st.integers(10, 200), st.integers(10, 200))
def test_a_wider_terminal_shows_no_less(narrow: int, wide: int) -> None:
    now = [told(rank, memory=1 << 10 * rank, state="T") for rank in range(3)]
    less, more = (
        set(worker_table.lines(worker_table.rows(now), width)[0].split())
        for width in sorted((narrow, wide))
    )
    assert less <= more


def test_a_long_id_makes_way_for_the_state() -> None:
    job = {"id": "5e4b7c1a-0d0c-4b0e-9f52-0123456789ab", "state": "running", "world_size": 4}
    job |= {"nodes": 1, "generation": 0, "restarts": 0, "max_restarts": 3, "seconds": 61.0}
    assert worker_table.title(job, 200).startswith(f"{job['id']}: running, 4 ranks, generation 0")
    assert worker_table.title(job, 40) == "5e4b7c1a…: running, 4 ranks, generation "
    assert worker_table.title({**job, "id": "net"}, 22) == "net: running, 4 ranks,"


@given(st.integers(0, 1 << 60))
def test_sizes_are_short(number: int) -> None:
    assert len(worker_table.size(number)) <= 8
