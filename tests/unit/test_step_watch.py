"""Which workers hang: by example, and by property."""

from __future__ import annotations

import os
from dataclasses import replace
from mmap import mmap
from types import SimpleNamespace
from unittest.mock import Mock

from hypothesis import given, strategies as st

from rallypoint._core import progress
from rallypoint._core.progress import COUNTED_FROM
from rallypoint.launch.coordination import step_tables
from rallypoint.launch.policy import Phase, State
from rallypoint.launch.supervision.hung_workers import HungWorkers
from rallypoint.launch.watching.step_watch import Standstill, StepWatch, behind


ALL, PAIR, OTHERS = 1, 2, 3


def test_nobody_is_to_blame_if_nobody_is_behind():
    assert behind({0: {ALL: 4}, 1: {ALL: 4}}) == ()
    assert behind({}) == ()


def test_the_one_that_has_begun_less_is_waited_for():
    assert behind({0: {ALL: 5}, 1: {ALL: 4}, 2: {ALL: 5}}) == (1,)


def test_who_waits_for_another_one_is_not_to_blame():
    # 2 waits for 1 in the large group, and 1 waits for 0 in the pair.
    tables = {0: {ALL: 4, PAIR: 6}, 1: {ALL: 4, PAIR: 7}, 2: {ALL: 5}}
    assert behind(tables) == (0,)


def test_groups_are_compared_among_their_members():
    assert behind({0: {ALL: 4, PAIR: 9}, 1: {ALL: 4, PAIR: 9}, 2: {ALL: 4, OTHERS: 1}}) == ()


def test_who_does_not_come_to_a_meeting_is_waited_for_whatever_it_has_begun_before():
    met = {COUNTED_FROM: 4, ALL: 0}
    assert behind({0: {COUNTED_FROM: 3, ALL: 90}, 1: met, 2: met}) == (0,)
    # 3 has not noticed the loss: it waits for 0 in an earlier collective.
    tables = {0: {COUNTED_FROM: 3, ALL: 90}, 1: met, 2: met, 3: {COUNTED_FROM: 3, ALL: 91}}
    assert behind(tables) == (0,)
    # All have met: the counts refer to the same place again.
    after = {COUNTED_FROM: 5, ALL: 2}
    assert behind({0: {COUNTED_FROM: 5, ALL: 1}, 1: after, 2: after}) == (0,)


def test_a_standstill_lasts_as_long_as_nothing_changes():
    watch = StepWatch(2.0)
    assert not watch.look(0.0, {0: {ALL: 1}})
    assert not watch.look(1.9, {0: {ALL: 1}})
    assert watch.look(2.0, {0: {ALL: 1}})
    assert not watch.look(2.5, {0: {ALL: 2}})
    assert watch.look(4.5, {0: {ALL: 2}})
    watch.forget()
    assert not watch.look(9.0, {0: {ALL: 2}})


def test_all_nodes_must_stand_still_since_the_same_meeting():
    both = Standstill(2, patience=5.0)
    assert both.tell(0.0, 0, 0, {0: {ALL: 3}}) is None
    assert both.tell(6.0, 1, 0, {1: {ALL: 2}}) is None, "what node 0 said is too old"
    assert both.tell(7.0, 0, 1, {0: {ALL: 3}}) is None, "another meeting"
    assert both.tell(8.0, 1, 1, {1: {ALL: 2}}) == ((1,), {0: {ALL: 3}, 1: {ALL: 2}})


def test_what_another_node_says_is_checked():
    tables = {0: {ALL: 3}, 5: {}}
    assert step_tables.from_json(step_tables.to_json(tables)) == tables
    for wrong in (None, [], {"a": {}}, {"1": 2}, {"1": {"x": 1}}):
        assert step_tables.from_json(wrong) == {}


def test_a_node_whose_workers_have_not_begun_takes_no_part():
    """It is in the round, but its fork server is still importing."""
    config = SimpleNamespace(step_timeout=1.0)
    now = SimpleNamespace(state=SimpleNamespace(phase=Phase.RUNNING, replaced=0))
    hung = HungWorkers(config, Mock(), Mock(), now, Mock(), lambda: False)  # type: ignore[arg-type]
    hung.hear_of_standstill(1, 0, {2: {ALL: 3}})


def test_a_node_says_how_far_those_are_that_are_in_the_session_though_one_is_on_its_way():
    """What the worker that is on its way waits for may be held up by a hanging worker of another node."""
    memory = os.memfd_create("progress")
    os.truncate(memory, progress.SIZE)
    with mmap(memory, progress.SIZE) as written:
        progress.Progress(written).restart(["all"], place=7)
        workers = [
            SimpleNamespace(ranks=SimpleNamespace(rank=rank), memory_fd=memory, pid=0)
            for rank in (2, 3)
        ]
        state = State(
            max_restarts=0,
            grace=1.0,
            phase=Phase.RUNNING,
            running=frozenset({0, 1}),
            kept=frozenset({0}),
            arriving=frozenset({1}),
        )
        others = Mock()
        now = SimpleNamespace(state=state, workers=workers)
        config = SimpleNamespace(step_timeout=1e-9, num_nodes=2)
        newcomers: list[int] = []
        hung = HungWorkers(
            config,  # type: ignore[arg-type]
            others,
            Mock(),
            now,  # type: ignore[arg-type]
            Mock(),
            lambda: bool(newcomers),
        )
        hung.begin(SimpleNamespace(workers_of_nodes=(2, 2), generation=0))  # type: ignore[arg-type]
        hung._look(0)
        newcomers.append(4)  # this node's workers have not been told to meet it
        hung._look(0)
        newcomers.clear()
        now.state = replace(state, arriving=frozenset())  # not all workers will be in a session
        hung._look(0)
    os.close(memory)
    (told,) = others.tell_standstill.call_args_list
    assert told.args == (0, 0, {2: {COUNTED_FROM: 7, progress.key_of("all"): 0}})


@given(
    sizes=st.integers(2, 6),
    hung=st.sets(st.integers(0, 5), min_size=1, max_size=3),
    order=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=30, max_size=200),
    data=st.data(),
)
def test_whoever_is_blamed_hangs(sizes, hung, order, data):
    """Ranks run one program of collectives over some groups; from some place on, hanging ranks start nothing more."""
    groups = [
        frozenset(range(sizes)),
        *(frozenset(data.draw(st.sets(st.integers(0, sizes - 1), min_size=2))) for _ in range(3)),
    ]
    program = [groups[number] for number, _ in order]
    stops = {rank: data.draw(st.integers(0, len(program))) for rank in hung if rank < sizes}
    begun = {
        rank: {number: 0 for number in range(4) if rank in groups[number]} for rank in range(sizes)
    }
    place = dict.fromkeys(range(sizes), 0)
    waiting: dict[int, int] = {}
    went_on = True
    while went_on:
        went_on = False
        for rank in range(sizes):
            at = place[rank]
            if at == len(program) or (rank in stops and at >= stops[rank]):
                continue
            members = program[at]
            if rank not in members:
                place[rank], went_on = at + 1, True
            elif rank not in waiting:
                waiting[rank], went_on = at, True
                begun[rank][order[at][0]] += 1
            if rank in waiting and all(
                waiting.get(each) == at or place[each] > at for each in members
            ):
                del waiting[rank]
                place[rank], went_on = at + 1, True
    blamed = behind(begun)
    assert set(blamed) <= set(stops), "somebody who waits was blamed"
    stuck = [rank for rank in range(sizes) if rank in waiting]
    assert blamed or not stuck, "somebody waits, and nobody is to blame"
