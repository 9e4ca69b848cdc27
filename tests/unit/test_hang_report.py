"""Whether idle workers hang: how long they stand still, and what their stacks say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint.control.stacks import hang_report
from rallypoint.launch.watching.stillness import Standstill, Stillness


def process(rank: int, *files: str, line: int = 1, name: str = "") -> dict[str, Any]:
    frames = [{"file": file, "line": line, "function": "f"} for file in files]
    thread = {"name": "", "frames": frames}
    return {
        "rank": rank,
        "pid": rank,
        "name": name,
        "threads": [thread] if files else [],
        "why": "x",
    }


COLLECTIVE = ("/train.py", "/lib/torch/distributed/distributed_c10d.py")
BACKWARD = ("/train.py", "/lib/torch/_tensor.py", "/lib/torch/autograd/graph.py")
RPC = ("/train.py", "/lib/torch/distributed/rpc/api.py")


def test_who_does_not_come_is_named() -> None:
    processes = [process(0, *COLLECTIVE), process(1, "/train.py"), process(2, *BACKWARD)]
    hang = hang_report.explain(processes, 60.0, 3)
    assert hang is not None and (hang.missing, hang.waiting) == ((1,), (0, 2))
    assert hang.text.startswith(
        "rank 1 does not come to a collective in which ranks 0, 2 wait: no worker has used CPU or storage for 60 s"
        " (a printed line does not count)\n"
    )


@pytest.mark.parametrize(
    ("second", "count", "says"),
    [
        (process(1, *COLLECTIVE), 2, "all ranks wait in the same collective"),
        (process(1, *COLLECTIVE, line=2), 2, "not at the same place"),
        (process(1, *COLLECTIVE), 3, "ranks 0, 1 wait in a collective, and no worker has used CPU"),
        (process(1), 2, "rank 1 does not come"),  # no stack: stopped, or stuck in the kernel
        (process(1, *RPC), 2, "rank 1 does not come"),
    ],
)
def test_what_is_said(second: dict[str, Any], count: int, says: str) -> None:
    hang = hang_report.explain([process(0, *COLLECTIVE), second], 60.0, count)
    assert hang is not None and says in hang.text.splitlines()[0]


MEETING = ("/train.py", "/lib/rallypoint/elastic/recovery/meeting.py")


def meets(rank: int, function: str = "_meet") -> dict[str, Any]:
    found = process(rank, *MEETING)
    found["threads"][0]["frames"][1]["function"] = function
    return found


def test_who_does_not_come_to_a_recovery_is_named() -> None:
    processes = [meets(0), process(1, "/train.py"), process(2, *COLLECTIVE), meets(3)]
    hang = hang_report.explain(processes, 60.0, 4)
    assert hang is not None and (hang.missing, hang.waiting) == ((1, 2), (0, 3))
    first, second, *_ = hang.text.splitlines()
    assert first == (
        "ranks 0, 3 wait for ranks 1, 2 to recover from a loss: no worker has used CPU or storage for 60 s"
        " (a printed line does not count)"
    )
    assert second == "--step-timeout SECONDS replaces workers of a session that hang"
    assert not hang.confirms(None) and hang.confirms(hang) and hang.is_certain


def test_who_is_at_work_elsewhere_during_a_recovery_is_named() -> None:
    hang = hang_report.explain([meets(0), process(1, "/train.py")], 180.0, 2, working=True)
    assert hang is not None and hang.missing == (1,)
    assert hang.text.startswith(
        "rank 0 has waited 180 s for rank 1 to recover from a loss; rank 1 is still at work\nrank 0 "
    )
    assert not hang.is_certain


def test_a_recovery_without_an_answer_from_elsewhere_is_a_hang_too() -> None:
    hang = hang_report.explain([meets(0), meets(1)], 60.0, 4)
    assert hang is not None and (hang.missing, hang.waiting) == ((), (0, 1))
    assert hang.text.startswith("ranks 0, 1 wait for others to recover from a loss: ")
    assert hang_report.explain([meets(0), meets(1)], 60.0, 4, working=True) is None


def test_the_supervisors_word_is_no_recovery_yet() -> None:
    assert hang_report.explain([meets(0, "_recover"), process(1)], 60.0, 2) is None


def test_a_sessions_own_barriers_are_collectives() -> None:
    barrier = ("/train.py", "/lib/rallypoint/elastic/communication/kept_group.py")
    hang = hang_report.explain([process(0, *barrier), process(1, "/train.py")], 60.0, 2)
    assert hang is not None and hang.missing == (1,)
    assert hang.text.startswith("rank 1 does not come to a collective in which rank 0 waits: ")


def test_who_does_nothing_after_others_have_ended_is_named() -> None:
    processes = [process(0, "/train.py"), process(3, "/train.py")]
    hang = hang_report.explain(processes, 60.0, 4, ended=[1, 2])
    assert hang is not None and (hang.missing, hang.waiting) == ((0, 3), ())
    assert hang.text.startswith(
        "ranks 0, 3 are still running, although ranks 1, 2 have ended: no worker has used CPU or storage for 60 s"
    )
    assert hang.confirms(None) and not hang.is_certain
    assert hang_report.explain(processes, 60.0, 4) is None, "servers"
    assert hang_report.explain(processes, 60.0, 4, ended=[1, 2], working=True) is None


def in_calls(rank: int, *functions: str, serves: bool = False) -> dict[str, Any]:
    """A rank whose main thread is in these functions of rpc, and that may serve a call in another thread."""
    files = {
        "shutdown": "/lib/rallypoint/rpc/finalization.py",
        "rpc_sync": "/lib/rallypoint/rpc/calling.py",
    }
    found = process(rank, "/train.py", *(files[each] for each in functions))
    for frame, function in zip(found["threads"][0]["frames"][1:], functions, strict=True):
        frame["function"] = function
    idle = {"file": "/lib/rallypoint/rpc/threads/poller.py", "line": 1, "function": "poll"}
    at_work = [
        {"file": "/lib/rallypoint/rpc/agent/serving.py", "line": 1, "function": "_execute"},
        {"file": "/train.py", "line": 70, "function": "slow"},
    ]
    found["threads"] += [{"name": "", "frames": each} for each in ([idle], at_work[: 2 * serves])]
    return {**found, "calls": 7}


@pytest.mark.parametrize(
    ("processes", "missing", "waiting", "says"),
    [
        (
            [in_calls(0, "shutdown"), in_calls(1), in_calls(2, "shutdown")],
            (1,),
            (0, 2),
            "ranks 0, 2 wait in rpc.shutdown() for rank 1: no worker has",
        ),
        (
            [in_calls(0, "shutdown"), in_calls(1, "shutdown", serves=True)],
            (1,),
            (0, 1),
            "ranks 0, 1 wait in rpc.shutdown(); rank 1 still serves one of their calls: no worker has",
        ),
        (
            [in_calls(0, "rpc_sync"), in_calls(1, "shutdown", serves=True)],
            (1,),
            (0,),
            "rank 0 waits for the answer to a call; rank 1 still serves one: no worker has",
        ),
        (
            [in_calls(0, "rpc_sync"), in_calls(1, "shutdown")],
            (),
            (0,),
            "rank 0 waits for the answer to a call: no worker has",
        ),
    ],
)
def test_ranks_that_wait_for_calls_are_named(
    processes: list[dict[str, Any]], missing: tuple[int], waiting: tuple[int], says: str
) -> None:
    hang = hang_report.explain(processes, 60.0, len(processes))
    assert hang is not None and (hang.missing, hang.waiting) == (missing, waiting)
    assert hang.text.startswith(says) and not hang.is_certain
    assert ("/train.py:70 in slow" in hang.text) == ("serves" in says)
    assert not hang.confirms(None) and hang.confirms(hang)
    for at in range(len(processes)):
        later = [{**each, "calls": each["calls"] + (i == at)} for i, each in enumerate(processes)]
        goes_on = hang_report.explain(later, 60.0, len(processes))
        assert goes_on is not None and not goes_on.confirms(hang)
    unknown = [{**each, "calls": None} for each in processes]
    assert hang_report.explain(unknown, 60.0, len(processes)) is None
    assert hang_report.explain(processes, 60.0, len(processes), working=True) is None


def test_servers_that_wait_for_requests_are_no_hang() -> None:
    assert hang_report.explain([in_calls(0), in_calls(1)], 60.0, 2) is None


def test_who_has_ended_is_named() -> None:
    processes = [process(0, *COLLECTIVE), process(2, *COLLECTIVE)]
    hang = hang_report.explain(processes, 60.0, 3, ended=[1])
    assert hang is not None and (hang.missing, hang.waiting) == ((1,), (0, 2))
    assert hang.text.splitlines()[0] == (
        "rank 1 does not come to a collective in which ranks 0, 2 wait: no worker has used CPU or storage for 60 s"
        " (a printed line does not count); rank 1 has ended"
    )


def test_who_has_ended_is_not_to_blame_if_another_does_not_come() -> None:
    processes = [process(0, *COLLECTIVE), process(2, "/train.py")]
    hang = hang_report.explain(processes, 60.0, 3, ended=[1])
    assert hang is not None and hang.missing == (2,)
    assert "ended" not in hang.text.splitlines()[0]


def test_who_has_ended_and_not_entered_a_recorded_collective_is_named() -> None:
    call = {
        "seq": 4,
        "op": "all_reduce",
        "sizes": [[10]],
        "dtype": "Float",
        "done": False,
        "seconds": 61.0,
        "at": "",
    }
    group = {"name": "0", "about": "default_pg", "ranks": [0, 1], "calls": [call]}
    waits = {**process(0, *COLLECTIVE), "collectives": [group]}
    hang = hang_report.explain([waits], 60.0, 2, ended=[1])
    assert hang is not None and hang.missing == (1,)
    first, second, *_ = hang.text.splitlines()
    assert first.endswith("in which rank 0 waits (61 s); rank 1 has ended")
    assert second == "no worker has used CPU or storage for 60 s (a printed line does not count)"


@pytest.mark.parametrize(("waited", "hangs"), [(1.0, False), (29.0, False), (31.0, True)])
@pytest.mark.parametrize("working", [False, True])
def test_ranks_that_have_just_begun_to_wait_take_steps_that_need_little_cpu(
    waited: float, *, hangs: bool, working: bool
) -> None:
    call = {"seq": 7, "op": "all_reduce", "sizes": [[4]], "dtype": "Float", "done": False}
    group = {"name": "0", "about": "default_pg", "ranks": [0, 1, 2]}
    processes = [process(0, *COLLECTIVE), process(1, *COLLECTIVE), process(2, "/train.py")]
    for each in processes[:2]:
        calls = [{**call, "seconds": waited, "at": ""}]
        each["collectives"] = [{**group, "calls": calls}]
    before = [{**call, "seq": 6, "done": True, "seconds": 0.0, "at": ""}]
    processes[2]["collectives"] = [{**group, "calls": before}]
    found = hang_report.explain(processes, 60.0, 3, working=working)
    assert (found is not None) == hangs
    if found is not None:
        assert (found.missing, found.waiting) == ((2,), (0, 1))


def stepping(*last: int) -> list[dict[str, Any]]:
    """Rank 0 is in a collective. ``last``: the number of the last one that each rank started, and completed; 0: not known."""
    call = {"op": "all_reduce", "sizes": [[4]], "dtype": "Float", "done": True, "seconds": 0.0}
    group = {"name": "0", "about": "default_pg", "ranks": list(range(len(last)))}
    processes = [process(rank, *(COLLECTIVE if rank == 0 else ())) for rank in range(len(last))]
    for each, seq in zip(processes, last, strict=True):
        if seq:
            each["collectives"] = [{**group, "calls": [{**call, "seq": seq, "at": ""}]}]
    return processes


@pytest.mark.parametrize(
    ("before", "now", "confirmed"),
    [
        ((7, 7, 7), (7, 7, 7), True),
        ((7, 7, 7), (8, 8, 8), False),
        ((7, 7, 7), (7, 7, 8), False),
        ((7, 0, 7), (7, 7, 7), True),
        ((7, 7, 0), (7, 0, 7), True),
        ((0, 0, 0), (0, 0, 0), True),  # none has a group yet
    ],
)
def test_what_only_stacks_tell_is_told_if_it_stays(
    before: tuple[int, ...], now: tuple[int, ...], *, confirmed: bool
) -> None:
    first = hang_report.explain(stepping(*before), 60.0, 3, working=True)
    second = hang_report.explain(stepping(*now), 60.0, 3, working=True)
    assert first is not None and second is not None
    assert not first.confirms(None)
    assert second.confirms(first) == confirmed


def test_another_rank_in_a_collective_confirms_nothing() -> None:
    first = hang_report.explain([process(0, *COLLECTIVE), process(1)], 60.0, 2)
    second = hang_report.explain([process(0), process(1, *COLLECTIVE)], 60.0, 2)
    assert first is not None and second is not None and not second.confirms(first)


def test_what_records_tell_needs_no_second_look() -> None:
    processes = stepping(7, 6)
    processes[0]["collectives"][0]["calls"][0].update(done=False, seconds=60.0)
    found = hang_report.explain(processes, 60.0, 2)
    assert found is not None and found.confirms(None)


@pytest.mark.parametrize("files", [("/serve.py",), RPC, ("/lib/torch/nn/module.py",)])
def test_nobody_in_a_collective_is_no_hang(files: tuple[str, ...]) -> None:
    assert hang_report.explain([process(0, *files), process(1, *files)], 60.0, 2) is None


def test_children_do_not_count_as_ranks() -> None:
    processes = [process(0, *COLLECTIVE), process(1, "/a.py"), process(1, "/b.py", name="child")]
    hang = hang_report.explain(processes, 60.0, 2)
    assert hang is not None and hang.missing == (1,)


def test_some_still_work() -> None:
    processes = [process(0, *COLLECTIVE), process(1, "/train.py"), process(2, *COLLECTIVE)]
    hang = hang_report.explain(processes, 300.0, 3, working=True)
    assert hang is not None
    assert hang.text.splitlines()[0] == (
        "ranks 0, 2 have waited in a collective for 300 s; rank 1 is still at work elsewhere"
    )
    assert hang_report.explain([process(0, *COLLECTIVE)], 300.0, 1, working=True) is None


# -- standing still -------------------------------------------------------------------------------


def used(cpu: float, moved: int = 0, pid: int = 1) -> dict[str, Any]:
    return {"pid": pid, "cpu": cpu, "read": moved, "written": 0}


def test_it_is_still_since_it_last_did_something() -> None:
    watch = Stillness()
    watch.look(0.0, {0: used(5.0), 1: used(5.0), 2: used(5.0), 3: used(5.0)})
    watch.look(10.0, {0: used(5.1), 1: used(6.0), 2: used(5.0, 1), 3: used(5.0, pid=2)})
    still = watch.look(20.0, {0: used(5.2), 1: used(6.0), 2: used(5.0, 1), 3: used(5.0, pid=2)})
    assert still == {0: 20.0, 1: 10.0, 2: 10.0, 3: 10.0}
    assert watch.still(25.0)[0] == 25.0
    assert watch.look(30.0, {1: used(9.0)}) == {1: 0.0}, "who is gone is forgotten"


@given(st.lists(st.tuples(st.floats(0.1, 10), st.booleans()), min_size=1, max_size=30))
def test_any_movement_ends_stillness(steps: list[tuple[float, bool]]) -> None:
    watch = Stillness()
    now, cpu = 0.0, 0.0
    watch.look(now, {0: used(cpu)})
    since = now
    for passed, moves in steps:
        now += passed
        if moves:
            cpu += passed
            since = now
        assert watch.look(now, {0: used(cpu)})[0] == pytest.approx(now - since)


def test_for_how_long_nobody_has_begun_a_collective() -> None:
    still = Standstill()
    assert still.look(0.0, {7, 8}, {}) == 0.0
    assert still.look(1.0, {7, 8}, {7: 3}) == 0.0
    assert still.look(5.0, {7, 8}, {7: 3, 8: 2}) == 0.0
    assert still.look(9.0, {7, 8}, {7: 3}) == 4.0  # rank 8 does not answer, so it starts nothing
    assert still.look(10.0, {7, 8}, {7: 3, 8: 2}) == 5.0
    assert still.look(11.0, {7, 9}, {7: 4}) == 0.0
    assert still.look(12.0, {9}, {7: 4}) == 0.0


def test_stacks_alone_do_not_tell_of_workers_that_are_busy() -> None:
    processes = [process(0, *COLLECTIVE), process(1, "/train.py")]
    assert hang_report.explain(processes, 60.0, 2, working=True, by_stacks=False) is None
    assert hang_report.explain(processes, 60.0, 2, working=True) is not None
