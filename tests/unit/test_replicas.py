"""How groups and meshes map to replicas: renewed ones equal those of a mesh with the new number of replicas."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.device_mesh import DeviceMesh

from rallypoint.elastic import torch_private
from rallypoint.elastic.communication.replicas import Span, replica_size, span_of
from rallypoint.elastic.state.meshes import Meshes


counts = st.integers(1, 5)


def groups_of(shape: tuple[int, ...], rank: int) -> list[tuple[int, ...]]:
    """The groups of a mesh over all ranks, for each subset of its dimensions, that a rank is in."""
    place, left = [], rank
    for size in reversed(shape):
        left, at = divmod(left, size)
        place.insert(0, at)
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    found = []
    for count in range(1, len(shape) + 1):
        for dims in itertools.combinations(range(len(shape)), count):
            free = [range(size) if dim in dims else (place[dim],) for dim, size in enumerate(shape)]
            found.append(
                tuple(
                    sum(at * stride for at, stride in zip(each, strides, strict=True))
                    for each in itertools.product(*free)
                )
            )
    return found


@given(st.integers(2, 5), counts, st.lists(st.integers(1, 3), min_size=1, max_size=2), st.data())
def test_groups_are_those_of_a_mesh_with_the_new_number_of_replicas(
    replicas: int, after: int, inner: list[int], data: st.DataObject
) -> None:
    before, now = (replicas, *inner), (after, *inner)
    size = 1
    for each in inner:
        size *= each
    rank = data.draw(st.integers(0, replicas * size - 1))
    new_rank = data.draw(st.integers(0, after - 1)) * size + rank % size
    for members, wanted in zip(groups_of(before, rank), groups_of(now, new_rank), strict=True):
        span = span_of(members, size, replicas * size)
        assert span is not None
        assert span.members(size, new_rank, after * size) == wanted


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_replica_has_the_ranks_among_which_tensors_are_sharded(
    replicas: int, inner: int, per_node: int, data: st.DataObject
) -> None:
    ranks = replicas * inner
    rank = data.draw(st.integers(0, ranks - 1))
    first = rank - rank % inner
    shards = tuple(range(first, first + inner))
    across = tuple(range(rank % inner, ranks, inner))
    groups = [tuple(range(ranks)), across, shards]
    assert replica_size(groups, [shards], ranks, inner * per_node) == inner
    if inner > 1:
        assert replica_size(groups, [shards], ranks, inner * per_node + 1) is None, "on two nodes"
        assert replica_size(groups, [shards, across], ranks, inner * per_node) is None


def test_other_groups_need_the_number_of_ranks_that_there_are() -> None:
    everybody = tuple(range(8))
    assert replica_size([everybody], [], 8, 4) == 1
    assert replica_size([everybody], [], 8, 3) == 1
    assert replica_size([everybody], [everybody], 8, 4) is None
    assert replica_size([(0,)], [], 1, 1) == 1
    assert replica_size([everybody, (0, 1)], [], 8, 4) == 2
    assert replica_size([everybody, (0, 1, 2)], [], 8, 4) == 4
    assert replica_size([everybody, (3, 4)], [], 8, 4) is None
    assert replica_size([everybody, (0, 4), (0, 1)], [], 8, 4) == 4
    assert replica_size([everybody, (0, 4), (0, 2)], [], 8, 2) is None
    assert replica_size([(0, 1), (0, 1)], [(0, 1)], 2, 2) is None, "one replica only"
    assert span_of((2, 0), 4, 8) == Span((2, 0), is_over_all=False)
    assert span_of((4, 0), 4, 8) is None


def mesh_of(ranks: list[list[int]], rank: int) -> DeviceMesh:
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


def test_a_mesh_stays_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of([[0, 1], [2, 3], [4, 5], [6, 7]], 5)
    monkeypatch.setattr(torch_private, "meshes", lambda: [mesh])
    meshes = Meshes([], 2, 8)
    assert meshes.can_resize
    for rank, ranks in ((3, 6), (1, 2), (9, 12)):
        meshes.resize(rank, ranks)
        wanted = torch.arange(ranks).view(-1, 2)
        assert mesh.shape == wanted.shape and torch.equal(mesh.mesh, wanted.int())
        assert mesh.get_coordinate() == (rank // 2, rank % 2)
        assert mesh == mesh_of(wanted.tolist(), rank)


@pytest.mark.parametrize(
    "ranks", [[[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1, 4, 5], [2, 3, 6, 7]], [[0, 3], [1, 2]]]
)
def test_a_mesh_whose_replicas_are_not_its_first_dimension_cannot_have_more_or_fewer(
    monkeypatch: pytest.MonkeyPatch, ranks: list[list[int]]
) -> None:
    mesh = mesh_of(ranks, 0)
    monkeypatch.setattr(torch_private, "meshes", lambda: [mesh])
    assert not Meshes([], 2, 8).can_resize
