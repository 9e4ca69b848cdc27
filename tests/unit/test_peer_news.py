"""What a supervisor makes of other nodes' reports."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from rallypoint.launch import policy
from rallypoint.launch.config import OnHang
from rallypoint.launch.coordination.interface import PeerEvent
from rallypoint.launch.policy import Phase, State
from rallypoint.launch.supervision.peer_news import PeerNews


LOST: Any = Mock()  # how a worker has failed


def news(now: Any, decided: list[Any]) -> PeerNews:
    replacements = Mock()
    replacements.locate = lambda node, failure, *, survivors: policy.LossTold(node, None, survivors)
    parts = (Mock(), Mock(), Mock(), replacements, Mock(), Mock(), Mock(), Mock())
    config: Any = SimpleNamespace(on_hang=OnHang.TELL)
    return PeerNews(config, now, *parts, decided.append, Mock())


def test_losses_of_a_round_that_has_formed_count_once_this_node_has_ended_its_last_one() -> None:
    state = State(max_restarts=3, grace=5.0, phase=Phase.STOPPING, generation=33)
    now, decided = SimpleNamespace(state=state), list[Any]()
    heard = news(now, decided)
    heard.hear(PeerEvent("worker lost", 2, 35, (LOST,)))
    heard.hear(PeerEvent("worker lost", 2, 34, (LOST,)))
    heard.hear(PeerEvent("worker lost", 2, 32, (LOST,)))
    assert decided == []
    now.state = replace(state, phase=Phase.RUNNING, generation=35)
    heard.begin()
    assert decided == [policy.LossTold(2, None, True)]
    heard.begin()
    assert len(decided) == 1
