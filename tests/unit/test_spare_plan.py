"""Spares: how many are started, with which ranks, and which spare takes which place."""

from __future__ import annotations

from hypothesis import given, strategies as st

from rallypoint.launch.supervision import spare_plan
from rallypoint.launch.supervision.spare_plan import Plan


def filled(plan: Plan, num_workers: int) -> Plan:
    while True:
        plan, spare = spare_plan.begin(plan, num_workers)
        if spare is None:
            return plan


def test_each_spare_runs_the_set_up_as_another_worker_from_the_last_one_on() -> None:
    plan = filled(Plan(wanted=3), 2)
    assert [each.index for each in plan.spares] == [1, 0, 1]


def test_a_spare_that_fits_no_other_place_is_taken_first() -> None:
    plan = filled(Plan(wanted=2), 4)
    plan = spare_plan.note_ready(plan, 0, is_bound=False)
    plan = spare_plan.note_ready(plan, 1, is_bound=True)
    assert spare_plan.choose(plan, plan.spares[1].index)[1] == plan.spares[1]
    assert spare_plan.choose(plan, 0)[1] == plan.spares[0]


def test_without_spares_none_is_started_and_nothing_is_over() -> None:
    assert spare_plan.begin(Plan(wanted=0, max_ends=0), 4) == (Plan(wanted=0, max_ends=0), None)
    assert not Plan(wanted=0, max_ends=0).is_over


def test_spares_that_still_need_a_lost_store_are_dropped_and_others_started_in_their_place() -> (
    None
):
    plan = filled(Plan(wanted=2), 2)
    plan = spare_plan.note_ready(plan, 0, is_bound=False)
    stores = {0: "a:1", 1: "a:1"}
    assert spare_plan.drop_stranded(plan, stores, "a:1") == (plan, [])
    left, dropped = spare_plan.drop_stranded(plan, stores, "b:1")
    assert ([each.number for each in left.spares], dropped) == ([0], [1])
    assert left.ends == (), "it has not ended on its own"
    assert spare_plan.begin(left, 2)[1] is not None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("begin", "ready", "bound", "end", "choose")),
        st.integers(0, 5),
        st.floats(0, 8, allow_nan=False),
    ),
    max_size=60,
)


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 3), STEPS)
def test_never_too_many_and_only_to_places_that_fit(
    wanted: int, num_workers: int, max_ends: int, steps: list[tuple[str, int, float]]
) -> None:
    plan, now, ends = Plan(wanted=wanted, max_ends=max_ends, window=10.0), 0.0, []
    used: set[int] = set()
    for what, number, wait in steps:
        now += wait
        known = {each.number for each in plan.spares}
        if what == "begin":
            was_over = plan.is_over
            plan, spare = spare_plan.begin(plan, num_workers)
            if spare is not None:
                assert spare.number not in used
                assert not was_over
                used.add(spare.number)
        elif what in {"ready", "bound"}:
            plan = spare_plan.note_ready(plan, number, is_bound=what == "bound")
        elif what == "end" and number in known:
            plan = spare_plan.note_end(now, plan, number)
            ends.append(now)
            assert plan.is_over == (len([at for at in ends if now - at < 10.0]) > max_ends)
        elif what == "choose":
            before = plan
            plan, spare = spare_plan.choose(plan, number)
            if spare is not None:
                assert spare.is_ready
                assert not spare.is_bound or spare.index == number
                assert spare not in plan.spares
            else:
                assert plan == before
                assert not any(e.is_ready and not e.is_bound for e in plan.spares)
        assert len(plan.spares) <= wanted
        assert all(0 <= each.index < num_workers for each in plan.spares)
