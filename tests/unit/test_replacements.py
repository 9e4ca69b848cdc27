"""What a supervisor tells the workers of a session as nodes come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from rallypoint.launch.policy import Phase, State
from rallypoint.launch.supervision.replacements import Replacements
from rallypoint.rendezvous.kept_round import Kept


STATE = State(max_restarts=0, grace=1.0, phase=Phase.RUNNING)


def grown() -> Any:
    """A round of three nodes, one of which has just come."""
    kept = Kept(keepers=frozenset({0, 1}), replaced=0, port=29500, before=(1, 1), were=(0, 1, -1))
    return SimpleNamespace(
        generation=4, node_rank=0, kept=kept, workers_of_nodes=(1, 1, 1), store="a:29500"
    )


def test_workers_that_start_anew_do_not_meet_those_that_were_to_come_before() -> None:
    now: Any = SimpleNamespace(state=STATE, round=grown(), workers=Mock(number=3))
    now.workers.folders.return_value = ()
    now.workers.__iter__ = lambda _: iter(())
    kept = Mock()
    replacements = Replacements(Mock(spares=0), Mock(), now, kept, Mock(), Mock(), Mock(), Mock())
    replacements.keep([], "a node wants to join")
    assert kept.tell_of_newcomers.called
    replacements.begin()
    replacements.heed_news()
    assert not kept.tell_of_lost_nodes.called
    replacements.keep([], "a node wants to join")
    replacements.heed_news()
    assert kept.tell_of_lost_nodes.called
