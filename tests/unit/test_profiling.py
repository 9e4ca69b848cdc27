"""Traces of several ranks merged into one; the hosts' clocks compared by collectives alone."""

from __future__ import annotations

import base64
import random
import zlib
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.control.profiling import host_clocks, profile_probe, trace_merging
from rallypoint.control.profiling.trace_merging import Trace
from rallypoint.launch.coordination import node_answers


def entered(times: list[float], first: int = 1) -> Any:
    since = round(times[0] * 1e9)
    return {
        "name": "0 gloo",
        "ranks": [0, 1, 2, 3],
        "since": since,
        "seqs": list(range(first, first + len(times))),
        "times": [(round(at * 1e9) - since) // 1000 for at in times],
        "kinds": [7] * len(times),
    }


def synchronous(seed: int, steps: int, apart: float) -> list[Any]:
    """Four ranks; the clock of the last two is ahead by ``apart``."""
    chance, at = random.Random(seed), 1000.0
    times: list[list[float]] = [[] for _ in range(4)]
    for _ in range(steps):
        for each in times:
            each.append(at + chance.uniform(0.001, 0.2))
        at = max(each[-1] for each in times)
    return [entered([at + apart * (rank > 1) for at in each]) for rank, each in enumerate(times)]


@given(st.integers(0, 1 << 32), st.integers(2, 100), st.floats(-5000, 5000))
@settings(max_examples=200, deadline=None)
def test_the_difference_of_two_clocks_is_within_its_bounds(
    seed: int, steps: int, apart: float
) -> None:
    ranks = synchronous(seed, steps, apart)
    found = host_clocks.offset([[each] for each in ranks[:2]], [[each] for each in ranks[2:]])
    assert found is not None and found.calls == steps - 1
    assert abs(found.seconds - apart) <= found.within + 1e-5
    assert found.within < 0.4, "a step of each side"


def test_calls_that_do_not_block_tell_nothing() -> None:
    one, other = entered([0.0, 1.0, 20.0, 40.0]), entered([0.0, 10.0, 10.1, 10.2])
    assert host_clocks.offset([[one]], [[other]]) is None
    assert host_clocks.offset([[one]], [[]]) is None
    assert host_clocks.offset([[one]], [[entered([1.0], first=9)]]) is None


def trace(rank: int, *, host: str = "a", base: int = 0, at: float = 10.0, **more: Any) -> Trace:
    pid = 100 + rank % 2  # pids on two hosts may be the same
    events = [
        {"ph": "X", "name": "work", "pid": pid, "tid": 1, "ts": at, "dur": 5.0},
        {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": at, "dur": 1.0},
        {"ph": "s", "name": "flow", "id": 3, "pid": pid, "tid": 1, "ts": at},
        {"ph": "f", "name": "flow", "id": 3, "pid": 0, "tid": 7, "ts": at},
        {"ph": "M", "name": "process_name", "pid": pid, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
    ]
    body = {"traceEvents": events, "baseTimeNanoseconds": base, "schemaVersion": 1}
    return Trace(rank=rank, pid=pid, host=host, body=body, **more)


def named(merged: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [each for each in merged["traceEvents"] if each["name"] == name]


def test_processes_are_named_by_rank_and_nothing_is_mixed_up() -> None:
    merged, remarks = trace_merging.chrome([trace(0), trace(1), trace(2)])
    assert remarks == []
    names = {each["pid"]: each["args"]["name"] for each in named(merged, "process_name")}
    assert sorted(names.values()) == [
        "rank 0 (pid 100 on a)",
        "rank 0: GPU 0",
        "rank 1 (pid 101 on a)",
        "rank 1: GPU 0",
        "rank 2 (pid 100 on a)",
        "rank 2: GPU 0",
    ]
    works = [names[each["pid"]] for each in named(merged, "work")]
    assert [each.partition(" (")[0] for each in works] == ["rank 0", "rank 1", "rank 2"]
    flows: dict[Any, set[int]] = {}
    for each in named(merged, "flow"):
        flows.setdefault(each["id"], set()).add(each["pid"] // 10_000)
    assert sorted(map(sorted, flows.values())) == [[0], [1], [2]]


def test_times_of_one_host_are_of_one_clock() -> None:
    merged, _ = trace_merging.chrome([trace(0, base=1_000_000, at=10.0), trace(1, base=0, at=20.0)])
    first, second = named(merged, "work")
    # 1 ms and 10 us; 20 us.
    assert first["ts"] - second["ts"] == 1000 + 10 - 20


def test_hosts_are_aligned_by_collectives_or_left_apart() -> None:
    apart = 3600.0
    ranks = synchronous(5, 50, apart)
    there = 10.0 + apart * 1e6
    both = [
        trace(0, entered=[ranks[0]]),
        trace(2, host="b", at=there, entered=[ranks[2]]),
    ]
    merged, (remark,) = trace_merging.chrome(both)
    first, second = named(merged, "work")
    assert abs(first["ts"] - second["ts"]) < 200_000
    assert remark.startswith("the clock of b is aligned to that of a by 49 collectives, to within ")
    merged, (remark,) = trace_merging.chrome([trace(0), trace(2, host="b", at=there)])
    first, second = named(merged, "work")
    assert first["ts"] == second["ts"]
    assert "the times of b (rank 2) cannot be compared with those of a" in remark


def test_hosts_of_the_same_name_have_clocks_of_their_own() -> None:
    both = [trace(0, clock="one"), trace(2, clock="other", at=99.0)]
    merged, remarks = trace_merging.chrome(both)
    first, second = named(merged, "work")
    assert first["ts"] == second["ts"] and len(remarks) == 1
    # Containers on one kernel have their own host names, but one clock.
    merged, remarks = trace_merging.chrome([trace(0, clock="one"), trace(2, host="b", clock="one")])
    assert remarks == []


def test_samples_are_merged() -> None:
    body = {
        "$schema": "s",
        "shared": {"frames": [{"name": "f"}, {"name": "g"}]},
        "profiles": [{"name": "thread 1", "samples": [[0, 1], [1]], "weights": [1, 1]}],
    }
    traces = [Trace(rank=rank, pid=1, host="a", body=body) for rank in (0, 3)]
    merged = trace_merging.speedscope(traces)
    assert [each["name"] for each in merged["profiles"]] == ["rank 0: thread 1", "rank 3: thread 1"]
    frames = merged["shared"]["frames"]
    for each in merged["profiles"]:
        stacks = [[frames[place]["name"] for place in stack] for stack in each["samples"]]
        assert stacks == [["f", "g"], ["g"]]
    assert merged["profiles"][1]["samples"] == [[2, 3], [3]]


def test_a_trace_of_another_node_is_whole_or_refused() -> None:
    data = b"[" + b"1," * 10_000 + b"1]"
    compressed = zlib.compress(data)
    packed = base64.b64encode(compressed).decode()
    assert profile_probe.unpacked(packed) == data
    assert profile_probe.unpacked(packed, most=len(data)) == data
    with pytest.raises(ValueError, match="it has more than 0.0190735 MiB: record less"):
        profile_probe.unpacked(packed, most=20_000)
    with pytest.raises(ValueError, match="it is cut off"):
        profile_probe.unpacked(base64.b64encode(compressed[:-20]).decode())
    for what in (base64.b64encode(data).decode(), "no base64"):
        with pytest.raises(ValueError):
            profile_probe.unpacked(what)


def test_another_node_cannot_name_a_file() -> None:
    record = {
        "rank": 0,
        "pid": 1,
        "host": "b",
        "trace": "",
        "packed": "",
        "why": "",
        "entered": [],
        "whole": True,
        "clock": "",
    }
    assert node_answers.processes({"processes": [record]}) == [record]
    assert node_answers.processes({"processes": [{**record, "trace": "/etc/passwd"}]}) == []
    assert node_answers.processes({"processes": [{**record, "entered": [1]}]}) == []
