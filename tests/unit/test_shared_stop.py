"""SIGTERM to nodes of an elastic job: either one is taken away, or all are to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from rallypoint.launch import policy
from rallypoint.launch.generation import Generation
from rallypoint.launch.policy import Phase, SignalReceived, State
from rallypoint.launch.supervision.shared_stop import MOMENT, SharedStop
from rallypoint.launch.supervision.situation import Situation


class Node:
    """A node, all of whose workers can take a last checkpoint. Its policy gets each event that it decides on."""

    def __init__(self, rank: int, nodes: int = 3, *, matters: bool = False, **state: Any) -> None:
        known = {"elastic": True, "num_nodes": nodes, "nodes": nodes, "phase": Phase.RUNNING}
        known |= {"running": frozenset({0}), "max_restarts": 0, "grace": 30.0}
        self.now = Situation(State(**{**known, **state}), Generation(0, rank))
        self.decided: list[policy.Event] = []
        self.told: list[str] = []
        self.saves = True
        self.moment_over: Callable[[], None] | None = None
        # What it asks of the loop, of the workers and of the other nodes.
        me = cast("Any", self)
        self.stop = SharedStop(me, self.now, me, me, self.decide, matters=matters)

    def decide(self, event: policy.Event) -> None:
        self.decided.append(event)
        self.now.state = policy.decide(0.0, self.now.state, event).state

    def after(self, delay: float, call: Callable[[], None]) -> None:
        assert MOMENT < delay < 1.1 * MOMENT
        self.moment_over = call

    def can_save(self, _: Generation) -> bool:
        return self.saves

    def tell_of_stop(self, _: Generation) -> None:
        self.told.append("workers")

    def tell(self, what: str, generation: int, _: object) -> None:
        self.told.append(what)


ALONE, ALL = SignalReceived(signal.SIGTERM), SignalReceived(signal.SIGTERM, everywhere=True)


def test_a_node_that_is_told_alone_leaves_after_a_moment() -> None:
    node = Node(1)
    assert node.stop.begin(signal.SIGTERM, 0.0)
    assert node.told == ["workers", "told"]
    assert node.decided == []
    assert node.moment_over is not None
    node.moment_over()
    assert node.decided == [ALONE]
    assert node.now.state.leaves


def test_nodes_that_are_all_told_stop_the_job() -> None:
    node = Node(0)
    assert node.stop.begin(signal.SIGTERM, 0.0)
    node.stop.hear(0)
    assert node.decided == [ALL]
    assert not node.now.state.leaves
    assert node.moment_over is not None
    node.moment_over()
    assert node.decided == [ALL], "once"


def test_others_that_are_told_do_not_stop_a_node_that_is_not() -> None:
    node = Node(0)
    node.stop.hear(0)
    assert node.decided == []


def test_words_of_another_generation_do_not_count() -> None:
    node = Node(0)
    node.now.state = replace(node.now.state, generation=1)
    assert node.stop.begin(signal.SIGTERM, 0.0)
    node.stop.hear(0)
    assert node.decided == []


@pytest.mark.parametrize(
    "state",
    [
        {"elastic": False},
        {"nodes": 1},
        {"phase": Phase.STOPPING},
        {"signal": signal.SIGTERM},
    ],
    ids=str,
)
def test_where_nothing_is_to_be_found_out_nobody_waits(state: dict[str, Any]) -> None:
    assert not Node(0, **state).stop.begin(signal.SIGTERM, 0.0)
    assert not Node(0).stop.begin(signal.SIGINT, 0.0)
    without = Node(0)
    without.saves = False
    assert not without.stop.begin(signal.SIGTERM, 0.0)


def test_where_the_job_may_be_requeued_nodes_ask_whose_workers_cannot_save() -> None:
    node = Node(0, matters=True)
    node.saves = False
    assert node.stop.begin(signal.SIGTERM, 0.0)
    assert node.told == ["told"], "workers get the signal, and nothing to wait for"
    node.stop.hear(0)
    assert node.decided == [ALL]


def test_a_job_that_has_one_node_left_ends_with_it_where_it_may_be_requeued() -> None:
    node = Node(0, nodes=1, matters=True)
    assert node.stop.begin(signal.SIGTERM, 0.0)
    node.stop.hear(0)
    assert node.decided == [ALL]


@pytest.mark.parametrize("repeats", [False, True])
def test_a_second_signal_is_haste_unless_the_cluster_repeats_it(repeats: bool) -> None:
    node = Node(0, sigterm_repeats=repeats)
    assert node.stop.begin(signal.SIGTERM, 0.0)
    assert node.stop.begin(signal.SIGTERM, 2.1) is repeats
    assert not node.stop.begin(signal.SIGINT, 2.1)


def test_a_signal_that_is_delivered_twice_is_no_haste() -> None:
    node = Node(0)
    assert node.stop.begin(signal.SIGTERM, 5.0)
    assert node.stop.begin(signal.SIGTERM, 5.1)
    assert node.stop.begin(signal.SIGHUP, 5.1)
    assert node.told == ["workers", "told"]
