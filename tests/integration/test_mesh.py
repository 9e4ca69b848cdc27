"""Process groups of a layout on real ranks: every rank in the right ones, created in the same way, destroyed and rebuilt."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rallypoint import parallel
from rallypoint.errors import ConfigError
from rallypoint.parallel import ParallelLayout, ParallelMesh, all_reduce, members
from rallypoint.parallel.layout import AXES
from rallypoint.parallel.mesh import STANDARD
from rallypoint.testing import Ranks


pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def two():
    started = Ranks(2)
    yield started
    started.close()


@pytest.fixture(scope="module")
def four():
    started = Ranks(4)
    yield started
    started.close()


@pytest.fixture(scope="module")
def eight():
    started = Ranks(8)
    yield started
    started.close()


def number_of_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def use_every_group(degrees: dict[str, int]) -> None:
    before = number_of_groups()
    layout = ParallelLayout(**degrees)
    mesh = ParallelMesh(layout, generation=7)
    joined = [*STANDARD, ("cp", "tp"), ("pp", "dp", "cp", "tp"), ("ep", "tp"), ("cp", "dp")]
    mesh.build(*joined)
    rank = dist.get_rank()
    assert dict(mesh.coordinates) == dict(mesh.layout.coordinates(rank))
    for axes in joined:
        group, peers = mesh.group(*axes), mesh.peers(*axes)
        assert dist.get_process_group_ranks(group) == list(peers)
        total = all_reduce(torch.tensor([10.0**rank], dtype=torch.float64), group)
        assert total.item() == sum(10.0**peer for peer in peers)
        if len(axes) == 1:
            assert dist.get_rank(group) == mesh.coordinates[axes[0]]
        if group is not dist.group.WORLD:
            assert group.group_desc.endswith("generation 7")
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            assert timeout.total_seconds() == 30, "not the default group's"
        assert mesh.group(*axes) is group
    mesh.destroy()
    assert number_of_groups() == before


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2, "pp": 2},
        {"dp": 4, "ep": 2, "tp": 2},
        {"cp": 2, "dp": 2, "pp": 2, "ep": -1},
        {"dp": 8, "ep": 4},
        {"tp": 8},
    ],
    ids=str,
)
def test_every_rank_is_in_the_groups_of_its_peers(eight, degrees):
    eight.run(use_every_group, degrees)


def share() -> None:
    mesh = ParallelMesh(ParallelLayout(tp=2)).build()
    assert mesh.group("dp", "tp") is dist.group.WORLD
    assert mesh.group("pp") is mesh.group("cp")
    assert dist.get_world_size(mesh.group("pp")) == 1
    assert mesh.group("dp", "cp") is mesh.group("dp") is mesh.group("edp")
    before = number_of_groups()
    mesh.build()
    assert number_of_groups() == before
    mesh.destroy()
    whole = ParallelMesh(ParallelLayout())
    assert whole.group("dp") is dist.group.WORLD
    own = ParallelMesh(ParallelLayout(), backends={"dp": "gloo"})
    assert own.group("dp") is not dist.group.WORLD
    own.destroy()
    whole.destroy()
    assert all_reduce(torch.ones(1)).item() == 4, "the default group stays"


def test_groups_are_shared_where_they_are_the_same(four):
    four.run(share)


def rebuild() -> None:
    before = number_of_groups()
    for generation in range(5):
        degrees = [{"tp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}][generation % 3]
        with ParallelMesh(ParallelLayout(**degrees), generation=generation) as mesh:
            mesh.build()
            for axis in AXES:
                found = all_reduce(torch.ones(1), mesh.group(axis))
                assert found.item() == mesh.degree(axis)
        assert number_of_groups() == before
    # A new default group over the same store, in the name of its generation; the old mesh is of no use there.
    old = ParallelMesh(ParallelLayout(tp=2)).build("tp")
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel.set_current_mesh(old)
    dist.destroy_process_group()
    for generation in range(1, 3):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"g{generation}", store), rank=rank, world_size=size
        )
        assert not old.stands
        assert parallel.current_mesh() is None
        with pytest.raises(ConfigError, match="its default group was replaced or destroyed"):
            old.group("tp")
        old.destroy()
        mesh = parallel.init_parallelism(2, pp_backend="gloo")
        assert parallel.current_mesh() is mesh
        assert all_reduce(torch.ones(1), mesh.group("tp")).item() == 2
        old = mesh
        if generation < 2:
            dist.destroy_process_group()
    parallel.destroy_parallelism()
    assert not old.stands


def destroy_at_once() -> None:
    for generation in range(30):
        mesh = ParallelMesh(ParallelLayout(), backends={"dp": "gloo"}, generation=generation)
        mesh.build("dp").destroy()


def test_a_group_is_whole_before_anybody_can_destroy_it(eight):
    eight.run(destroy_at_once)


def test_destroyed_and_rebuilt(four):
    four.run(rebuild)
    four.close()  # its default group was replaced


def device_meshes() -> None:
    rank = dist.get_rank()
    mesh = ParallelMesh(ParallelLayout(dp=2, tp=2))
    grid = mesh.device_mesh("dp", "tp")
    assert grid.mesh.tolist() == [[0, 1], [2, 3]]
    assert grid.mesh_dim_names == ("dp", "tp")
    assert grid["tp"].get_group() is mesh.group("tp")
    assert list(grid.get_coordinate()) == [rank // 2, rank % 2]
    turned = mesh.device_mesh("tp", "dp", names=("a", "b"))
    assert turned.mesh.tolist() == [[0, 2], [1, 3]]
    assert turned["b"].get_group() is mesh.group("dp")
    assert mesh.device_mesh("dp").mesh.tolist() == list(mesh.peers("dp"))
    with pytest.raises(ConfigError, match="expected 2, one for each"):
        mesh.device_mesh("dp", "tp", names=("a",))

    # FSDP2 over dp, tensor parallel over tp: what DeviceMesh is for.
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    part = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    part.load_state_dict(whole.state_dict())
    parallelize_module(part, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(part, mesh=grid["dp"])
    x = torch.randn(6, 4, dtype=torch.float64)
    whole(x).square().mean().backward()
    own = x.chunk(2)[mesh.coordinates["dp"]]
    part(own).square().mean().backward()
    for mine, right in zip(part.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), right.grad)

    experts = ParallelMesh(ParallelLayout(dp=4, ep=2)).device_mesh("edp", "ep")
    assert experts.mesh.tolist() == [[0, 1], [2, 3]]
    mesh.destroy()


def test_device_meshes_stand_on_the_same_groups(four):
    four.run(device_meshes)


def simple_form() -> None:
    mesh = parallel.init_parallelism(model_parallelism=2)
    assert (mesh.degree("tp"), mesh.degree("dp"), mesh.degree("pp")) == (2, 1, 1)
    assert mesh.group("tp") is dist.group.WORLD
    parallel.destroy_parallelism()
    mesh = parallel.init_parallelism(pipeline_parallelism=2, mp_backend="gloo", dp_backend="gloo")
    assert mesh.peers("pp") == (0, 1)
    assert mesh.backend_of("tp") == mesh.backend_of("edp") == "gloo"
    parallel.destroy_parallelism()
    both = parallel.init_parallelism(2, dp_backend="cpu:gloo")
    assert both.device_mesh("tp").device_type == "cpu"
    assert members.device_of(both.group("dp")).type == "cpu"
    parallel.destroy_parallelism()
    with pytest.raises(ConfigError, match="world_size 2: expected a multiple of tp=3"):
        parallel.init_parallelism(3)
    with pytest.raises(ConfigError, match=r"backends\['tp'\] 'nosuch': expected one of .*gloo"):
        parallel.init_parallelism(2, mp_backend="nosuch")
    assert parallel.current_mesh() is None


def test_the_simple_form(two):
    two.run(simple_form)
