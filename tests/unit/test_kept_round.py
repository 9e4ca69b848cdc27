"""Whether a round's nodes keep their workers: a table, and what holds for any records."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint.rendezvous.kept_round import Held, Kept, decide, wanted


def member(rank: int | None, **changes: Any) -> dict[str, Any]:
    held = Held(**{"generation": 4, "workers": (2, 2, 1), "port": 29500, **changes})
    return {"last_rank": rank, "facts": {"held": held.to_json()}}


FOUR: dict[str, Any] = {"workers": (1, 1, 1, 1)}
NEW = {"last_rank": None, "facts": {}}
RESTARTS = {"last_rank": 1, "facts": {}}


@pytest.mark.parametrize(
    ("why", "records", "workers", "keepers"),
    [
        ("a new node has the free place", [member(0), NEW, member(2)], [2, 2, 1], {0, 2}),
        ("two are new", [member(0), NEW, NEW], [2, 2, 1], {0}),
        ("nobody has the record of node 2", [NEW, member(1), NEW], [2, 2, 1], None),
        ("nobody has the record of node 0", [NEW, NEW, member(2)], [2, 2, 1], None),
        (
            "a worker with the record of node 0 is about to enter the session",
            [NEW, member(1, has_records=False), member(2)],
            [2, 2, 1],
            None,
        ),
        (
            "it has no other record than its own, and the next node has that",
            [NEW, member(1, **FOUR), member(2, has_records=False, **FOUR), member(3, **FOUR)],
            [1, 1, 1, 1],
            {1, 2, 3},
        ),
        (
            "nobody has the record of node 1, the store's node is lost with two others",
            [NEW, NEW, NEW, member(3, **FOUR)],
            [1, 1, 1, 1],
            None,
        ),
        (
            "two nodes have copies of each node's records",
            [NEW, NEW, member(2, copies=3, **FOUR), member(3, copies=3, **FOUR)],
            [1, 1, 1, 1],
            {2, 3},
        ),
        (
            "three nodes are lost, which two copies do not survive",
            [NEW, NEW, NEW, member(3, copies=3, **FOUR)],
            [1, 1, 1, 1],
            None,
        ),
        (
            "so are workers of all nodes, and the store is there",
            [member(0, has_records=False), member(1, has_records=False), NEW],
            [2, 2, 1],
            {0, 1},
        ),
        (
            "node 0 has not begun to serve the workers' store",
            [member(0, port=0), NEW, NEW],
            [2, 2, 1],
            None,
        ),
        ("nor has it here", [member(0, port=0), NEW, member(2)], [2, 2, 1], {0, 2}),
        ("all are back", [member(0), member(1), member(2)], [2, 2, 1], {0, 1, 2}),
        ("fewer nodes", [member(0), member(1)], [2, 2], None),
        ("more nodes", [member(0), member(1), member(2), NEW], [2, 2, 1, 1], None),
        ("the new node has other workers", [member(0), NEW, member(2)], [2, 4, 1], None),
        ("a rank has changed", [member(0), member(2), NEW], [2, 2, 1], None),
        ("one has stopped its workers", [member(0), RESTARTS, member(2)], [2, 2, 1], {0, 2}),
        ("it has the place of a lost one", [member(0), member(1), RESTARTS], [2, 2, 1], {0, 1}),
        ("nobody else has its records", [RESTARTS, RESTARTS, member(2)], [2, 2, 1], None),
        ("of another round", [member(0), NEW, member(2, generation=3)], [2, 2, 1], None),
        ("nobody holds any", [NEW, NEW, NEW], [2, 2, 1], None),
        (
            "no worker has the state",
            [member(0, has_state=False), NEW, member(2, has_state=False)],
            [2, 2, 1],
            None,
        ),
    ],
)
def test_who_keeps(why, records, workers, keepers):
    kept, _ = decide(records, workers)
    assert (None if kept is None else kept.keepers) == keepers, why


def test_the_workers_meet_in_a_later_meeting_than_any_of_them_knows_of():
    kept, _ = decide([member(0, replaced=2), NEW, member(2, replaced=3)], [2, 2, 1])
    assert kept == Kept(keepers=frozenset({0, 2}), replaced=3, port=29500)


def test_a_new_node_0_serves_another_store():
    kept, _ = decide([NEW, member(1), member(2)], [2, 2, 1])
    assert kept is not None
    assert kept.port == 0


SIX: dict[str, Any] = {"workers": (2, 2, 2), "resizes": True}


@pytest.mark.parametrize(
    ("why", "records", "workers", "found"),
    [
        (
            "fewer nodes",
            [member(0, **SIX), member(2, **SIX)],
            [2, 2],
            {"keepers": {0, 1}, "before": (2, 2, 2), "were": (0, 2), "origins": (0, 2)},
        ),
        (
            "without the one that has the store",
            [member(2, **SIX), member(1, **SIX)],
            [2, 2],
            {"keepers": {0, 1}, "before": (2, 2, 2), "were": (2, 1), "origins": (2, 1), "port": 0},
        ),
        (
            "one more",
            [member(0, **SIX), member(1, **SIX), member(2, **SIX), NEW],
            [2, 2, 2, 2],
            {"keepers": {0, 1, 2}, "were": (0, 1, 2, -1), "origins": (0, 1, 2, 2)},
        ),
        (
            "as many, with other ranks",
            [member(2, **SIX), NEW, member(1, **SIX)],
            [2, 2, 2],
            {"keepers": {0, 2}, "were": (2, -1, 1), "origins": (2, 1, 1), "port": 0},
        ),
        (
            "one comes after others have gone",
            [
                member(0, **{**SIX, "workers": (2, 2), "first": (2, 2, 2), "origin": 0}),
                member(1, **{**SIX, "workers": (2, 2), "first": (2, 2, 2), "origin": 2}),
                NEW,
            ],
            [2, 2, 2],
            {"keepers": {0, 1}, "before": (2, 2), "were": (0, 1, -1), "origins": (0, 2, 2)},
        ),
        (
            "a lost one is replaced after others have gone",
            [
                member(0, **{**SIX, "workers": (2, 2), "first": (2, 2, 2), "origin": 1}),
                NEW,
            ],
            [2, 2],
            {"keepers": {0}, "before": (), "were": (), "origins": (1, 1)},
        ),
        ("one cannot", [member(0, **SIX), member(2, **{**SIX, "resizes": False})], [2, 2], None),
        ("a new one has other workers", [member(0, **SIX), member(1, **SIX), NEW], [2, 2, 4], None),
        ("one has fewer workers now", [member(0, **SIX), member(1, **SIX)], [2, 1], None),
        (
            "a new one, and nobody has records",
            [NEW, *(member(each, **SIX, has_records=False) for each in (1, 2, 0))],
            [2, 2, 2, 2],
            None,
        ),
    ],
)
def test_who_goes_on_in_another_number(why, records, workers, found):
    kept, _ = decide(records, workers)
    if found is None:
        assert kept is None, why
        return
    assert kept is not None, why
    assert {name: getattr(kept, name) for name in found} == found, why
    assert kept.first == (2, 2, 2)
    assert Kept.from_json(json.loads(json.dumps(kept.to_json()))) == kept


def test_whose_records_newcomers_rely_on():
    kept = Kept(keepers=frozenset({1, 2, 3}), replaced=0, port=0)
    assert [kept.relies_on(rank, 4) for rank in (1, 2, 3)] == [True, False, True]
    more = Kept(keepers=frozenset({1, 2, 3}), replaced=0, port=0, copies=3)
    assert not any(more.relies_on(rank, 4) for rank in (1, 2, 3))
    fewer = Kept(keepers=frozenset({2, 3}), replaced=0, port=0, copies=3)
    assert [fewer.relies_on(rank, 4) for rank in (2, 3)] == [True, True]
    # If one keeper lacks records, as a process there is on its way to the session, newcomers rely on the other one only.
    one = Kept(keepers=frozenset({1, 2}), replaced=0, port=0, copies=4, lacking=frozenset({2}))
    assert [one.relies_on(rank, 4) for rank in (1, 2)] == [True, False]
    assert not Kept(keepers=frozenset({1, 2}), replaced=0, port=29500).relies_on(1, 3)
    assert Kept(keepers=frozenset({0, 1, 2}), replaced=0, port=0, first=(2, 2)).relies_on(1, 3)


def test_one_that_lacks_records_leaves_another_one_alone_with_them():
    four = {"workers": (2, 2, 2, 2), "copies": 4}
    records = [NEW, member(1, **four), member(2, **four, has_records=False), NEW]
    kept, _ = decide(records, [2, 2, 2, 2])
    assert kept is not None
    read = Kept.from_json(json.loads(json.dumps(kept.to_json())))
    assert read == kept
    assert [kept.relies_on(rank, 4) for rank in (1, 2)] == [True, False]


def test_an_origin_that_was_not_in_the_first_round_keeps_nobody():
    told = {"resizes": True, "first": (2, 2, 1, 1)}
    kept, _ = decide(
        [member(0, **told), member(1, origin=1, **told), member(2, origin=3, **told)], [2, 2, 1]
    )
    assert kept is not None
    lost, why = decide(
        [member(0, **told), member(1, origin=4, **told), member(2, **told)], [2, 2, 1]
    )
    assert lost is None
    assert why.startswith("the set-up record that new workers need")


@pytest.mark.parametrize(
    ("records", "workers", "words"),
    [
        ([member(0), member(1), member(2)], [2, 2, 1], ""),
        ([NEW, NEW, NEW], [2, 2, 1], ""),
        ([RESTARTS, RESTARTS, NEW], [2, 2, 1], ""),
        ([member(0), NEW, member(2, generation=3)], [2, 2, 1], "of different rounds"),
        ([member(0, has_state=False), NEW, NEW], [2, 2, 1], "has the session's state"),
        ([member(0), member(1), NEW], [2, 1, 1], "node 1 has another number of workers"),
        ([member(0), member(1)], [2, 2], "5 ranks would become 4"),
        ([member(0), member(1), NEW], [2, 2, 4], "5 ranks would become 8"),
    ],
)
def test_it_is_said_why_nobody_keeps_workers(records, workers, words):
    _, why = decide(records, workers)
    assert words in why if words else not why


def test_how_many_nodes_it_takes():
    assert wanted([member(0), NEW]) == 3
    assert wanted([NEW, RESTARTS]) == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["held", "workers", "generation", "replaced", "keepers", "port", "first", "were"]
            ),
            each,
        )
    ),
    max_leaves=8,
)


@given(
    st.lists(
        st.fixed_dictionaries({"last_rank": st.none() | st.integers(-1, 3), "facts": JSON}),
        max_size=4,
    )
)
def test_records_that_make_no_sense_keep_nobody_or_are_read_as_numbers(records):
    kept, _ = decide(records, [1] * len(records))
    assert kept is None or Kept.from_json(json.loads(json.dumps(kept.to_json()))) == kept


@given(JSON)
def test_any_plan_can_be_read(plan):
    kept = Kept.from_json(plan)
    assert kept is None or Kept.from_json(kept.to_json()) == kept
