"""Which ranks make the others wait, by when each enters its collectives: found where it is so, and never by chance."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint._core import flight_records
from rallypoint.control.slowness.differences import Surroundings, differences
from rallypoint.control.slowness.lateness import LEAST, Lateness, lateness
from rallypoint.control.slowness.places import own_place
from rallypoint.control.slowness.slow_ranks import SHARE, SlowRanks, makes_wait


STEP = 0.1


def entered(times: list[float], *, kinds: list[int] | None = None, size: int = 4) -> Any:
    """What a rank reports about one group."""
    since = round(times[0] * 1e9)
    return {
        "name": "0 gloo",
        "ranks": list(range(size)),
        "since": since,
        "seqs": list(range(1, len(times) + 1)),
        "times": [(round(at * 1e9) - since) // 1000 for at in times],
        "kinds": kinds or [7] * len(times),
    }


def synchronous(
    seed: int, work: list[float], jitter: float, steps: int, *, begin: float = 0.0
) -> dict[int, Any]:
    """Ranks that compute for given times, with jitter, and then wait for each other."""
    chance = random.Random(seed)
    at, found = begin, {rank: [] for rank in range(len(work))}
    for _ in range(steps):
        for rank, each in enumerate(work):
            found[rank].append(at + each * (1 + jitter * chance.expovariate(1)))
        at = max(times[-1] for times in found.values())
    return {rank: [entered(times, size=len(work))] for rank, times in found.items()}


def slow(known: dict[int, Any]) -> set[int]:
    found = lateness(known, 60.0)
    return {rank for rank, each in found.items() if each.is_sure and each.share >= SHARE}


JOBS = {
    "seed": st.integers(0, 1 << 32),
    "ranks": st.integers(2, 8),
    "jitter": st.floats(0, 1),
    "steps": st.integers(LEAST + 1, 300),
}


@given(**JOBS)
@settings(max_examples=300, deadline=None)
def test_no_rank_of_an_even_job_is_slow(seed: int, ranks: int, jitter: float, steps: int) -> None:
    assert slow(synchronous(seed, [STEP] * ranks, jitter, steps)) == set()


# With few steps, a single one in which chance makes another rank later leaves doubt.
@given(
    **JOBS | {"steps": st.integers(4 * LEAST, 300)}, odd=st.integers(0, 7), more=st.floats(0.5, 3)
)
@settings(max_examples=200, deadline=None)
def test_the_slow_rank_is_found_and_no_other(
    seed: int, ranks: int, jitter: float, steps: int, odd: int, more: float
) -> None:
    odd %= ranks
    work = [STEP * (1 + more * (rank == odd)) for rank in range(ranks)]
    found = lateness(synchronous(seed, work, jitter / 10, steps), 60.0)
    late = {rank for rank, each in found.items() if each.is_sure and each.share >= SHARE}
    assert late == {odd}
    wanted = more / (1 + more)
    assert found[odd].share == pytest.approx(wanted, abs=0.15)
    assert found[odd].waiting < 0.1
    assert all(each.waiting > wanted - 0.15 for rank, each in found.items() if rank != odd)


@given(seed=st.integers(0, 99), order=st.permutations(range(4)), begin=st.floats(0, 2e9))
@settings(max_examples=50, deadline=None)
def test_names_of_ranks_and_the_time_of_day_do_not_matter(
    seed: int, order: list[int], begin: float
) -> None:
    work = [STEP, STEP, 2 * STEP, STEP]
    found = slow(synchronous(seed, work, 0.2, 60))
    other = synchronous(seed, work, 0.2, 60, begin=round(begin, 3))
    assert slow({order[rank]: groups for rank, groups in other.items()}) == {
        order[rank] for rank in found
    }


def test_a_few_steps_prove_nothing() -> None:
    work = [STEP, STEP, 3 * STEP, STEP]
    assert lateness(synchronous(0, work, 0.1, LEAST), 60.0) == {}
    assert slow(synchronous(0, work, 0.1, LEAST + 1)) == {2}


def test_a_hiccup_now_and_then_is_not_slow() -> None:
    """A rank that writes a checkpoint in every tenth step."""
    at, times = 0.0, {rank: [] for rank in range(3)}
    for step in range(100):
        for rank in range(3):
            times[rank].append(at + STEP + (5.0 if rank == 1 and step % 10 == 0 else 0.0))
        at = max(each[-1] for each in times.values())
    assert slow({rank: [entered(each, size=3)] for rank, each in times.items()}) == set()


def test_buckets_in_the_background_are_counted_once() -> None:
    """As in DDP: ranks wait only at the end of a step; a slow rank falls further behind with each bucket."""
    buckets, at = 10, 0.0
    times: dict[int, list[float]] = {rank: [] for rank in range(4)}
    for _ in range(60):
        for rank in range(4):
            pace = 1.03 if rank == 3 else 1.0
            times[rank] += [at + pace * STEP * (n + 1) / buckets for n in range(buckets)]
        at = max(each[-1] for each in times.values())
    kinds = list(range(buckets)) * 60
    found = lateness({rank: [entered(each, kinds=kinds)] for rank, each in times.items()}, 60.0)
    assert found[3].is_sure and found[3].share == pytest.approx(0.03 / 1.03, abs=0.005)


def test_calls_that_others_leave_behind_are_not_waited_for() -> None:
    """A rank's lag in the background may grow; no other rank stands still for it."""
    times = {rank: [n * (1.05 if rank == 1 else 1.0) for n in range(100)] for rank in range(3)}
    known = {rank: [entered(each, size=3)] for rank, each in times.items()}
    assert slow(known) == set()


def test_a_rank_is_compared_only_where_it_is_known() -> None:
    known = synchronous(0, [STEP] * 4, 0.1, 60)
    assert lateness({1: known[1]}, 60.0) == {}
    assert set(lateness({1: known[1], 2: known[2]}, 60.0)) == {1, 2}
    other = [{**known[2][0], "kinds": [8] * 60}]  # its calls are of another kind
    assert lateness({1: known[1], 2: other}, 60.0) == {}


# -- look after look -----------------------------------------------------------------------------------------


def late(share: float, *, sure: bool = True) -> Lateness:
    return Lateness(step=STEP, late=share * STEP, waits=0.0, is_sure=sure)


def test_a_rank_is_slow_after_a_minute_and_not_after_a_moment() -> None:
    ranks = SlowRanks(60.0)
    for now in (0.0, 20.0, 40.0):
        assert ranks.look(now, {0: late(0.0), 1: late(0.3)}).slow == ()
    assert ranks.look(60.0, {0: late(0.0), 1: late(0.3)}).slow == (1,)
    assert ranks.look(80.0, {0: late(0.0), 1: late(0.3)}).slow == (), "told once"
    assert ranks.slow == (1,)
    assert ranks.look(100.0, {}).over == (), "no answer says nothing"
    assert ranks.look(120.0, {1: late(0.05)}).over == ()
    assert ranks.look(140.0, {1: late(0.05)}).over == (1,)
    assert ranks.slow == ()


def test_where_all_wait_for_cpus_more_is_needed() -> None:
    ranks = SlowRanks(60.0)
    for now in (0.0, 30.0, 60.0, 90.0):
        assert ranks.look(now, {0: late(0.0), 1: late(0.3)}, 0.25).slow == ()
    assert not makes_wait(Lateness(step=0.01, late=0.0015, waits=0.0, is_sure=True))


@given(
    looks=st.lists(
        st.tuples(st.floats(0.1, 30), st.dictionaries(st.integers(0, 3), st.floats(0, 0.5))),
        max_size=40,
    )
)
def test_only_who_has_made_the_others_wait_all_the_time_is_slow(looks: list[Any]) -> None:
    ranks, now = SlowRanks(60.0), 0.0
    history: list[tuple[float, dict[int, float]]] = []
    for passed, shares in looks:
        now += passed
        history.append((now, shares))
        news = ranks.look(now, {rank: late(share) for rank, share in shares.items()})
        for rank in news.slow:
            known = [(at, each[rank]) for at, each in history if rank in each]
            recent = [(at, share) for at, share in known if at >= now - 60]
            assert all(share >= SHARE for _, share in recent)
            assert any(at <= now - 60 and share >= SHARE for at, share in known)
        assert not set(news.slow) & set(news.over)


# -- what differs --------------------------------------------------------------------------------------------

USUAL = Surroundings(cpu=0.6, cpu_wait=0.02, cpus=(0, 1, 2, 3), clock=3000.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"throttled": 0.4, "group": "/a"}, "its control group (/a) was throttled 40% of the time"),
        (
            {"cpu_wait": 0.45, "neighbours": "stress (pid 7, 98% of a core)"},
            "its main thread had to wait for a CPU 45% of the time (the others: 2%):"
            " stress (pid 7, 98% of a core) on the same CPUs",
        ),
        ({"cpus": (3,)}, "it may use CPU 3 only, the others 4"),
        ({"nice": 5}, "its priority is lower (nice 5)"),
        ({"memory_pressure": 0.2}, "it had to wait for memory 20% of the time"),
        ({"swapped": 64 << 20}, "64 MiB of it are swapped out"),
        ({"faults": 300.0}, "it reads memory from disk (300 major page faults per second)"),
        ({"disk_wait": 0.3}, "it waits for a disk 30% of the time"),
        ({"clock": 1500.0}, "its CPUs run at 1500 MHz, the others' at 3000"),
        ({"remote": 0.9}, "90% of its memory are on another NUMA node than its CPUs"),
        ({"cpu": 0.9}, "it computes more than they do: more data, or a larger part of the model?"),
        (
            {"cpu": 0.1},
            "it computes no more than they do: it waits, for data or for something else",
        ),
    ],
)
def test_what_differs_is_told(changes: dict[str, Any], says: str) -> None:
    from dataclasses import replace

    found = differences(replace(USUAL, **changes), [USUAL] * 3)
    assert found == [says]


def test_what_all_have_is_no_difference() -> None:
    throttled = Surroundings(throttled=0.5, cpu_wait=0.5, swapped=1 << 30, cpu=1.0)
    assert differences(throttled, [throttled] * 3) == []


# -- what workers tell ---------------------------------------------------------------------------------------


def test_records_become_times() -> None:
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "is_p2p": False,
            "collective_seq_id": seq,
            "time_created_ns": 1_000_000_000 + seq * 5_000_000,
            "input_sizes": [[seq // 3]],
            "input_dtypes": ["Float"],
        }
        for seq in (1, 2, 3)
    ]
    import json

    dump = json.dumps({"entries": entries})
    (found,) = flight_records.entered([dump], {"0": [0, 1]}, 2)
    assert (found["seqs"], found["times"], found["since"]) == ([2, 3], [0, 5000], 1_010_000_000)
    assert len(set(found["kinds"])) == 2
    assert flight_records.are_entered([found])
    assert flight_records.entered([dump], {"0": [0]}, 2) == [], "alone in a group"


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda each: (
            st.lists(each)
            | st.dictionaries(
                st.sampled_from(["name", "ranks", "since", "seqs", "times", "kinds"]), each
            )
        ),
    )
)
def test_nonsense_is_no_record(body: Any) -> None:
    if flight_records.are_entered(body):
        lateness({0: body, 1: body}, 1.0)


def test_the_place_of_a_slow_rank_is_not_where_all_are() -> None:
    assert own_place({}, []) == ""
    assert own_place({"a": 3, "b": 2}, []) == "a"
    # For the rest of the time, the others wait in one of their collectives.
    others = [{"load": 4, "all_reduce": 6}, {"load": 5, "all_reduce": 5}]
    assert own_place({"load": 6, "augment": 4}, others) == "augment"
    # It does the same as the other, but is slower.
    assert own_place({"load": 2, "forward": 8}, [{"load": 2, "forward": 4}]) == "forward"
