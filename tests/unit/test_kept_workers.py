"""What a supervisor tells people about a session's losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rallypoint.launch.coordination.interface import RoundReady
from rallypoint.launch.supervision.kept_workers import KeptWorkers
from rallypoint.rendezvous.kept_round import Kept


READY = RoundReady(generation=0, node_rank=0, workers_of_nodes=(4,), master_addr="a", master_port=1)
KEPT = Kept(keepers=frozenset({0}), replaced=0, port=1)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def kept(said: list[str]) -> KeptWorkers:
    return KeptWorkers(said.append)


def lose(kept: KeptWorkers, ranks: list[int], replaced: int) -> None:
    ready = replace(READY, replaced=replaced, kept=KEPT, is_keeper=True)
    kept.tell_of_lost_nodes(NOBODY, ready, ranks, "why")


NOBODY: Any = ()


def met(generation: int) -> dict[str, Any]:
    times = {"formed": 0.1, "transferred": 0.0, "received": 0}
    return {"generation": generation, "steps": 7, "repeated": True, "redone": 0, **times}


def test_who_was_lost_before_all_had_met_is_back_too(kept: KeptWorkers, said: list[str]) -> None:
    lose(kept, [1], 1)
    kept.note_recovery(met(1), 2)  # one of two has met; then another loss
    lose(kept, [3], 2)
    for _ in range(2):
        kept.note_recovery(met(2), 2)
    assert said[-1].startswith("ranks 1, 3 are back at step 7 (repeated): all met in 100 ms")
    # The next loss starts a new count.
    lose(kept, [3], 3)
    for _ in range(2):
        kept.note_recovery(met(3), 2)
    assert said[-1].startswith("rank 3 is back at step 7")


def test_a_rank_that_was_lost_twice_is_named_once(kept: KeptWorkers, said: list[str]) -> None:
    lose(kept, [1], 1)
    lose(kept, [1], 2)
    kept.note_recovery(met(2), 1)
    assert said[-1].startswith("rank 1 is back at step 7")


def test_where_no_rank_was_lost_all_are_back(kept: KeptWorkers, said: list[str]) -> None:
    lose(kept, [], 1)
    kept.note_recovery(met(1), 1)
    assert said[-1].startswith("all ranks are back at step 7")
