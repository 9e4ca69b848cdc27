"""What a supervisor says about its job while it waits for other nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.launch.watching import status


@pytest.mark.parametrize(
    ("nodes", "arrived", "words"),
    [
        ((4, 4), None, "waiting for other nodes"),
        ((4, 4), 0, "waiting to be admitted"),
        ((4, 4), 2, "waiting for nodes, 2 of 4"),
        ((4, 4), 5, "waiting for nodes, 4 of 4"),
        ((2, 4), 1, "waiting for nodes, 1 of 2"),
        ((2, 4), 2, "waiting for nodes, 2 of 4"),
        ((None, 3), 1, "waiting for nodes, 1 of 3"),
    ],
)
def test_who_waits_for_nodes_says_for_how_many(
    nodes: tuple[int | None, int], arrived: int | None, words: str
) -> None:
    config: Any = SimpleNamespace(min_nodes=nodes[0], num_nodes=nodes[1])
    assert status._waiting_for_nodes(config, arrived) == words
