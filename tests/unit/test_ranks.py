"""Ranks: each is assigned once, and the workers of a node have consecutive ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from rallypoint._core.rank_words import in_words
from rallypoint.errors import ConfigError
from rallypoint.launch.placement.ranks import WorkerRanks, assign


NODES = st.lists(st.integers(1, 9), min_size=1, max_size=9)


def everybody(workers_of_nodes, **more) -> list[list[WorkerRanks]]:
    return [list(assign(workers_of_nodes, node, **more)) for node in range(len(workers_of_nodes))]


@given(NODES)
def test_every_rank_is_given_once_in_the_order_of_nodes(workers_of_nodes):
    ranks = [worker.rank for node in everybody(workers_of_nodes) for worker in node]
    assert ranks == list(range(sum(workers_of_nodes)))


@given(NODES)
def test_workers_of_a_node_are_neighbours(workers_of_nodes):
    for node_rank, node in enumerate(everybody(workers_of_nodes)):
        assert [worker.local_rank for worker in node] == list(range(workers_of_nodes[node_rank]))
        assert all(b.rank == a.rank + 1 for a, b in itertools.pairwise(node))
        assert {worker.group_rank for worker in node} == {node_rank}


@given(NODES)
def test_all_agree_on_the_sizes(workers_of_nodes):
    for node_rank, node in enumerate(everybody(workers_of_nodes)):
        for worker in node:
            assert worker.world_size == sum(workers_of_nodes)
            assert worker.local_world_size == workers_of_nodes[node_rank]
            assert worker.group_world_size == len(workers_of_nodes)


@given(NODES, st.integers(0, 9), st.integers(0, 9))
def test_a_part_of_a_larger_job_is_moved_as_a_whole(workers_of_nodes, offset, others):
    own = sum(workers_of_nodes)
    parts = everybody(workers_of_nodes, rank_offset=offset, world_size=offset + own + others)
    ranks = [worker.rank for node in parts for worker in node]
    assert ranks == list(range(offset, offset + own))
    assert {worker.world_size for node in parts for worker in node} == {offset + own + others}


def test_tasks_of_one_machine_share_it():
    """`srun --ntasks-per-node=2` on two machines: four supervisors with one worker each."""
    machine, task = 1, 0
    (worker,) = assign(
        (1, 1, 1, 1),
        2,
        local_rank_base=task,
        local_world_size=2,
        group_rank=machine,
        group_world_size=2,
    )
    assert worker == WorkerRanks(
        rank=2, world_size=4, local_rank=0, local_world_size=2, group_rank=1, group_world_size=2
    )


@pytest.mark.parametrize(("offset", "world"), [(1, 4), (0, 3), (4, 4)])
def test_a_rank_outside_of_the_world_is_refused(offset, world):
    with pytest.raises(ConfigError, match=f"exceed world size {world}"):
        assign((4,), 0, rank_offset=offset, world_size=world)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([0, 1, 2, 3, 12, 14, 15], "ranks 0-3, 12, 14, 15"),
    ],
)
def test_ranks_in_words(ranks, words):
    assert in_words(ranks) == words
