"""Which collectives ranks are in: torch's records in compact form, and which ranks wait for which."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint._core import flight_records
from rallypoint.control.collectives import collective_waits


def call(
    seq: int, op: str = "all_reduce", *, done: bool = False, size: int = 4, seconds: float = 60.0
) -> dict[str, Any]:
    return {
        "seq": seq,
        "op": op,
        "sizes": [[size]],
        "dtype": "Float",
        "done": done,
        "at": "" if done else "train.py:9 in step",
        "seconds": seconds,
    }


def group(*calls: dict[str, Any], ranks: int | list[int] = 4, about: str = "default_pg") -> Any:
    members = list(range(ranks)) if isinstance(ranks, int) else ranks
    return {"name": about, "about": about, "ranks": members, "calls": list(calls)}


WAITS = group(call(6, done=True), call(7))
BEHIND = group(call(6, done=True))


def test_who_has_not_entered_is_named() -> None:
    found = collective_waits.verdict({0: [WAITS], 1: [WAITS], 2: [BEHIND], 3: [WAITS]})
    assert found is not None
    assert (found.missing, found.waiting) == ((2,), (0, 1, 3))
    assert found.text == (
        "rank 2 has not entered all_reduce #7 of the default group (float32 [4], 16 B), in which ranks 0, 1, 3 wait (60 s)"
    ).replace(
        " of the default group (float32 [4], 16 B)", " (float32 [4], 16 B) of the default group"
    )


def test_of_two_groups_with_the_same_members_the_right_one_is_named() -> None:
    idle = group(call(900, done=True))
    waits, behind = (
        group(call(2), about="checkpoint"),
        group(call(1, done=True), about="checkpoint"),
    )
    found = collective_waits.verdict(
        {0: [idle, waits], 1: [idle, waits], 2: [idle, behind]} | {3: [idle, waits]}
    )
    assert found is not None
    assert found.missing == (2,)
    assert "of group checkpoint" in found.text
    assert "default group" not in found.text


def test_who_does_not_answer_is_missing_if_all_others_wait() -> None:
    found = collective_waits.verdict({0: [WAITS], 1: [WAITS], 3: [WAITS]})
    assert found is not None and found.missing == (2,)


@pytest.mark.parametrize(
    ("known", "missing", "says"),
    [
        # Rank 1 is behind; ranks 2 and 3 are on a node that did not answer.
        ({0: [WAITS], 1: [BEHIND]}, (1,), "rank 1 has not entered all_reduce #7"),
        # Rank 1 does not answer, though its node does.
        ({0: [WAITS]}, (1,), "rank 1 has not entered all_reduce #7"),
        (
            {0: [WAITS], 1: [WAITS]},
            (),
            "ranks 0, 1 wait in all_reduce #7 (float32 [4], 16 B) of the default group (60 s); nothing is known of ranks 2, 3,"
            " whose nodes did not answer",
        ),
    ],
)
def test_ranks_of_a_node_that_does_not_answer_are_not_to_blame(
    known: dict[int, Any], missing: tuple[int, ...], says: str
) -> None:
    found = collective_waits.verdict(known, unheard=(2, 3))
    assert found is not None
    assert found.missing == missing
    assert found.text.startswith(says)
    assert found.waiting == tuple(rank for rank in known if known[rank] == [WAITS])


def test_nobody_waits_in_vain() -> None:
    assert collective_waits.verdict({rank: [BEHIND] for rank in range(4)}) is None
    # All have entered the same collective: the network is at fault, or it is in progress.
    assert collective_waits.verdict({rank: [WAITS] for rank in range(4)}) is None
    assert collective_waits.verdict({}) is None


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (call(7, "broadcast"), "rank 3 calls broadcast (float32 [4], 16 B)"),
        (call(7, size=1 << 20), "rank 3 calls all_reduce (float32 [1048576], 4.0 MiB)"),
    ],
)
def test_calls_that_do_not_match_are_told(odd: dict[str, Any], says: str) -> None:
    known = {rank: [WAITS] for rank in range(3)} | {3: [group(call(6, done=True), odd)]}
    found = collective_waits.verdict(known)
    assert found is not None and found.missing == (3,)
    assert found.text == (
        f"the calls #7 of the default group do not match: {says} at train.py:9 in step,"
        " ranks 0-2 call all_reduce (float32 [4], 16 B) at train.py:9 in step"
    )


def test_sizes_may_differ_where_they_may() -> None:
    known = {rank: [group(call(7, "alltoall_base", size=rank))] for rank in range(4)}
    assert collective_waits.verdict(known) is None


def test_two_sides_that_are_alike_are_both_told_and_nobody_is_blamed() -> None:
    known = {0: [group(call(1), ranks=2)], 1: [group(call(1, "barrier"), ranks=2)]}
    found = collective_waits.verdict(known)
    assert found is not None and (found.missing, found.waiting) == ((), (0, 1))


def test_a_circle_over_two_groups() -> None:
    """Rank 3 waits in the barrier of all ranks, and rank 2 waits for it in the all_reduce of their group."""
    part = [2, 3]
    waits_for_3 = [
        group(call(1, done=True)),
        group(call(1), ranks=part, about="tp"),
    ]
    barrier = group(call(1, done=True), call(2, "barrier"))
    found = collective_waits.verdict({0: [barrier], 1: [barrier], 2: waits_for_3, 3: [barrier]})
    assert found is not None
    assert "rank 2 has not entered barrier #2" in found.text
    assert "rank 3 has not entered all_reduce #1 (float32 [4], 16 B) of group tp" in found.text
    assert "it waits in barrier #2 (float32 [4], 16 B) of the default group" in found.text


def test_a_place_in_words() -> None:
    assert (
        collective_waits.place([WAITS])
        == "all_reduce #7 (float32 [4], 16 B) of the default group for 60 s"
    )
    assert collective_waits.place([BEHIND]) == ""
    odd = group(call(3), ranks=[1, 2], about="undefined")
    assert "of the group of ranks 1, 2 for" in collective_waits.place([odd])


def entry(seq: int, *, retired: bool, p2p: bool = False) -> dict[str, Any]:
    return {
        "collective_seq_id": seq,
        "is_p2p": p2p,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[2, 3]],
        "output_sizes": [[2, 3]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "retired": retired,
        "time_created_ns": 1_000_000_000,
    }


def test_records_are_compact() -> None:
    dump = json.dumps(
        {
            "entries": [entry(seq, retired=seq < 90) for seq in range(100)]
            + [entry(7, retired=False, p2p=True)]
        }
    )
    (found,) = flight_records.compact([dump], {"0": [0, 1]}, 3_500_000_000, "train.py:9 in step")
    assert flight_records.are_valid([found])
    assert (found["name"], found["about"], found["ranks"]) == ("0 gloo", "default_pg", [0, 1])
    assert [each["seq"] for each in found["calls"]] == list(range(87, 100))
    assert found["calls"][-1] == {
        "seq": 99,
        "op": "all_reduce",
        "sizes": [[2, 3]],
        "dtype": "Float",
        "done": False,
        "at": "train.py:9 in step",
        "seconds": 2.5,
    }
    assert flight_records.compact(['{"entries": null}'], {}, 0) == []


def test_calls_of_a_group_that_was_destroyed_are_not_those_of_the_next_one() -> None:
    """torch gives the next default group the same name and counts from the start; its recorder keeps the old calls."""
    entries = [entry(seq, retired=True) for seq in range(1, 101)]
    entries += [entry(seq, retired=seq < 3) for seq in (1, 2, 3)]
    dump = json.dumps({"entries": entries})
    (found,) = flight_records.compact([dump], {"0": [0, 1]}, 0)
    assert [(each["seq"], each["done"]) for each in found["calls"]] == [
        (1, True),
        (2, True),
        (3, False),
    ]
    (late,) = flight_records.entered([dump], {"0": [0, 1]}, 50)
    assert late["seqs"] == [1, 2, 3]


def test_each_backend_of_a_group_counts_its_own_calls() -> None:
    dumps = [
        json.dumps(
            {"entries": [{**entry(1, retired=False), "profiling_name": f"{backend}:all_reduce"}]}
        )
        for backend in ("gloo", "nccl")
    ]
    found = flight_records.compact(dumps, {"0": [0, 1]}, 0)
    assert [(each["name"], len(each["calls"])) for each in found] == [("0 gloo", 1), ("0 nccl", 1)]


def test_collectives_of_all_groups_are_counted_together() -> None:
    status = json.dumps(
        {
            "pg_status": {
                "0": {"last_enqueued_collective": "4"},
                "1": {"last_enqueued_collective": "-1"},
            }
        }
    )
    assert flight_records.begun([status, "{}"]) == 4


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "about", "ranks", "calls", "seq"]), inner)
    ),
)


@given(json_values)
def test_foreign_records_are_refused_not_raised_at(value: Any) -> None:
    if flight_records.are_valid(value):
        collective_waits.verdict({0: value})


calls = st.builds(
    call,
    st.integers(0, 3),
    st.sampled_from(["all_reduce", "barrier", "alltoall"]),
    done=st.booleans(),
    size=st.integers(0, 3),
)
groups = st.builds(
    lambda found, part: group(
        *sorted(found, key=lambda each: each["seq"]),
        ranks=3 if part is None else part,
        about="default_pg" if part is None else "part",
    ),
    st.lists(calls, max_size=4, unique_by=lambda each: each["seq"]),
    st.none() | st.just([0, 2]),
)


@given(st.dictionaries(st.integers(0, 2), st.lists(groups, max_size=2)))
def test_whoever_is_missing_does_not_wait_and_there_is_a_text(known: Any) -> None:
    found = collective_waits.verdict(known)
    if found is not None:
        assert found.text
        assert not set(found.missing) & set(found.waiting) or not found.missing
        assert set(found.missing) <= {0, 1, 2}
