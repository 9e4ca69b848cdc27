"""A round's plan: its cost to the job's restart budget, and which nodes will serve the store if it is lost."""

import pytest
from hypothesis import given, strategies as st

from rallypoint.rendezvous import plan


def record(verdict: str, restarts: int = 0, last_rank: int | None = 0) -> dict:
    more = {} if last_rank is None else {"last_rank": last_rank}
    return {"facts": {"restarts": restarts, "verdict": verdict}, **more}


@pytest.mark.parametrize(
    ("verdicts", "whole", "charged"),
    [
        (["", ""], True, 0),
        (["failed", ""], True, 1),
        (["failed", "failed"], True, 1),
        (["failed", "changed"], False, 1),
        # An echo of a lost node costs nothing; where no node is lost, it was not an echo.
        (["suspect", "suspect"], False, 0),
        (["suspect", "suspect"], True, 1),
        (["suspect", "failed"], False, 1),
        # A node stopped its workers to admit another one; other nodes' workers died of that first.
        (["suspect", "changed"], True, 0),
        (["changed", "changed"], True, 0),
    ],
)
def test_a_failure_is_charged_once_and_a_change_of_members_is_not(verdicts, whole, charged):
    records = [record(each, restarts=3, last_rank=rank) for rank, each in enumerate(verdicts)]
    assert plan.restarts(records, whole=whole) == 3 + charged


def test_what_befell_a_node_before_the_last_round_is_settled():
    records = [record(""), record("failed", last_rank=None)]
    assert plan.restarts(records, whole=True) == 0


def test_the_node_that_knows_of_most_restarts_is_right():
    assert plan.restarts([record("", 1), record("", 4), {"facts": "?"}], whole=True) == 4


@given(st.lists(st.booleans(), min_size=1, max_size=2 * plan.NUM_STANDBYS))
def test_standbys_are_listed_by_rank_but_first_those_that_newcomers_find(
    listed: list[bool],
) -> None:
    records = {
        slot: {
            "id": f"node {slot}",
            "facts": {"standby": {"addr": "h", "port": 1, **({"listed": True} if each else {})}},
        }
        for slot, each in enumerate(listed)
    }
    made = plan.make("by", 0, list(records), [], records)
    head = range(min(len(listed), plan.NUM_STANDBYS))
    expected = [rank for rank in head if listed[rank]] + [rank for rank in head if not listed[rank]]
    assert [each["rank"] for each in made["standbys"]] == expected
    assert [each["id"] for each in made["standbys"]] == [f"node {rank}" for rank in expected]
