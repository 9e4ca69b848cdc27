"""What a supervisor tells the workers of a session as nodes come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from rallypoint.launch.policy import Phase, State
from rallypoint.launch.supervision.replacements import Replacements
from rallypoint.rendezvous.kept_round import Kept


STATE = State(max_restarts=0, grace=1.0, phase=Phase.RUNNING)


def grown(store_port: int) -> tuple[Replacements, Any]:
    """The object under test, in a round of three nodes, one of which has just come; and what it tells workers.

    Args:
        store_port: the port of the workers' store; 0: their store is another one now.
    """
    kept = Kept(
        keepers=frozenset({0, 1}), replaced=0, port=store_port, before=(1, 1), were=(0, 1, -1)
    )
    ready = SimpleNamespace(
        generation=4, node_rank=0, kept=kept, workers_of_nodes=(1, 1, 1), store="a:29500"
    )
    now: Any = SimpleNamespace(state=STATE, round=ready, workers=Mock(number=3))
    now.workers.folders.return_value = ()
    now.workers.__iter__ = lambda _: iter(())
    told = Mock()
    made = Replacements(Mock(spares=0), Mock(), now, told, Mock(), Mock(), Mock(), Mock())
    return made, told


def test_workers_go_on_until_those_that_have_come_are_in_the_session() -> None:
    replacements, told = grown(29500)
    replacements.keep([], "a node wants to join")
    assert told.tell_of_newcomers.called
    assert not told.tell_of_lost_nodes.called
    replacements.heed_news()
    assert told.tell_of_lost_nodes.called


def test_workers_that_start_anew_do_not_meet_those_that_were_to_come_before() -> None:
    replacements, told = grown(29500)
    replacements.keep([], "a node wants to join")
    replacements.begin()
    replacements.heed_news()
    assert not told.tell_of_lost_nodes.called


def test_in_a_new_store_those_that_come_need_what_the_others_have() -> None:
    replacements, told = grown(0)
    replacements.keep([], "a node wants to join")
    assert told.tell_of_lost_nodes.called
