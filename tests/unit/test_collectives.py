"""Without a process group every collective is the identity; impossible arguments are still refused."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

from rallypoint import parallel
from rallypoint.errors import ConfigError
from rallypoint.parallel import (
    ParallelLayout,
    ParallelMesh,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_dynamic,
    broadcast,
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter,
    reduce_scatter_sequence,
    scatter_to,
)


EVERY = [
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter,
    reduce_scatter_sequence,
    scatter_to,
]


@pytest.mark.parametrize("collective", EVERY, ids=lambda each: each.__name__)
@pytest.mark.parametrize("checks", [False, True])
def test_without_a_group_it_is_the_identity(collective, checks):
    x = torch.randn(3, 4, requires_grad=True)
    y = collective(x, checks=checks)
    assert torch.equal(y, x)
    (y**2).sum().backward()
    assert torch.equal(x.grad, 2 * x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own use of it
def test_without_a_group_it_has_a_derivative_in_forward_mode():
    x = torch.randn(3, 4)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(all_reduce(forward_ad.make_dual(x, 2 * x)))
    assert torch.equal(found.tangent, 2 * x)


def test_rows_go_to_oneself():
    x = torch.randn(3, 4)
    assert torch.equal(all_to_all(x, send_splits=[3], recv_splits=[3]), x)
    for splits in ([3], torch.tensor([3])):
        rows, received = all_to_all_dynamic(x, splits)
        assert torch.equal(rows, x)
        assert received == [3]


def test_no_graph_breaks_without_a_group(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # the compiler sets it

    def every(x):
        for collective in EVERY:
            x = collective(x)
        return x

    x = torch.randn(3, 4)
    assert torch.equal(torch.compile(every, backend="eager", fullgraph=True)(x), x)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: all_to_all(x, send_splits=[2]), "expected send_splits and recv_splits"),
        (
            lambda x: all_to_all(x, send_splits=[2], recv_splits=[2]),
            "all_to_all: send_splits [2] add up to 2 rows, but x has 3",
        ),
        (lambda x: all_to_all(x, send_splits=[1, 2], recv_splits=[3]), "has 2 entries"),
        (lambda x: all_to_all_dynamic(x, torch.tensor([1, 2])), "has 2 entries"),
        (lambda x: all_to_all_dynamic(x, torch.tensor([3.0])), "send_splits: expected whole"),
        (lambda x: all_to_all_dynamic(x, [4]), "add up to 4 rows, but x has 3"),
        (lambda x: all_to_all(x.sum()), "x of shape [] has no dimension 0"),
        (lambda x: all_gather(x, dim=2), "all_gather: x of shape [3, 4] has no dimension 2"),
        (lambda x: scatter_to(x, dim=-3), "scatter_to: x of shape [3, 4] has no dimension -3"),
        (lambda x: broadcast(x, 1), "broadcast: src 1: expected 0 to 0"),
        (lambda x: all_reduce(x, op="max"), "op 'max': expected sum or mean"),
        (
            lambda x: all_reduce(x.long(), op="mean"),
            "expected a floating-point or complex x, not torch.int64",
        ),
        (lambda x: reduce_scatter(x.long(), op="mean"), "not torch.int64 (use op='sum')"),
    ],
)
def test_what_cannot_be_is_refused(call, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        call(torch.randn(3, 4))


def test_importing_it_does_not_import_the_compiler():
    program = "import sys, rallypoint.parallel; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


# -- the mesh of one process ---------------------------------------------------------------------------


def test_the_mesh_of_one_process_has_no_groups():
    mesh = ParallelMesh(ParallelLayout()).build()
    assert mesh.group("dp") is None
    assert mesh.group("dp", "cp") is None
    assert set(mesh.coordinates.values()) == {0}
    with pytest.raises(ConfigError, match="there is no default group"):
        mesh.device_mesh("dp")
    mesh.destroy()
    mesh.destroy()
    with pytest.raises(ConfigError, match="it has been destroyed"):
        mesh.group("dp")


@pytest.mark.parametrize(
    ("layout", "backends", "text"),
    [
        (ParallelLayout(tp=2), {}, "world_size 1: expected a multiple of tp=2"),
        (
            ParallelLayout(),
            {"mp": "gloo"},
            "backends 'mp': expected one of pp, dp, cp, tp, ep, edp",
        ),
        (ParallelLayout(), {"dp": ""}, "backends['dp'] '': expected the name of a backend"),
    ],
)
def test_a_mesh_that_cannot_be(layout, backends, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        ParallelMesh(layout, backends=backends)


def test_the_backend_of_joined_axes_is_that_of_the_first_that_has_one():
    mesh = ParallelMesh(ParallelLayout(), backends={"dp": "a", "ep": "b"})
    assert mesh.backend_of("dp", "cp") == "a"
    assert mesh.backend_of("cp", "dp") == "a"
    assert mesh.backend_of("edp") == "a"
    assert mesh.backend_of("ep") == "b"
    assert mesh.backend_of("tp") is None


def test_the_generation_is_the_launchers(monkeypatch):
    monkeypatch.setenv("RALLY_GENERATION", "3")
    assert ParallelMesh(ParallelLayout()).generation == 3
    assert ParallelMesh(ParallelLayout(), generation=4).generation == 4


def test_there_is_one_current_mesh():
    mesh = parallel.init_parallelism()
    assert parallel.current_mesh() is mesh
    assert parallel.set_current_mesh(mesh) is mesh
    with pytest.raises(ConfigError, match="this process has a mesh already"):
        parallel.init_parallelism()
    parallel.destroy_parallelism()
    assert parallel.current_mesh() is None
    parallel.destroy_parallelism()
    for wrong in (-1, 0, True, "2"):
        with pytest.raises(ConfigError, match=r"model_parallelism .*: expected a whole number"):
            parallel.init_parallelism(wrong)


def test_a_mesh_destroyed_behind_our_back_is_forgotten():
    parallel.init_parallelism().destroy()
    assert parallel.current_mesh() is None
