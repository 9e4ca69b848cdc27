"""Sessions with sharded state: workers are killed, all ranks go back to a snapshot, and the result is as if none had been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic import listens, wait_until
from ports import free_port
from supervisors import Popen, run
from trainings import train, undisturbed


pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[1] / "sharded_train.py"
Fault = tuple[int, int, str]


def assert_survived(
    tmp_path: Path, workers: int, kind: str, faults: list[Fault], redone: int = 4, every: int = 4
) -> None:
    ends, _ = train(tmp_path / "hurt", SCRIPT, workers, faults, kind, every)
    calm = undisturbed(SCRIPT, workers, kind, 4)
    for rank, (end, wanted) in enumerate(zip(ends, calm, strict=True)):
        for what in ("steps", "bits", "random", "rate", "score"):
            assert end[what] == wanted[what], f"rank {rank}: {what}"
        assert end["pid"], "objects and process are those of the beginning"
        assert max(end["redone"], default=0) <= redone
    # A process has seen the losses since it took over its rank.
    for rank, end in enumerate(ends):
        own = [number for number, fault in enumerate(faults) if fault[1] == rank]
        assert len(end["redone"]) == len(faults) - (own[-1] if own else 0)


def test_a_killed_worker_of_fsdp2_costs_the_steps_since_the_last_snapshot(tmp_path: Path) -> None:
    faults = [
        (0, 1, "forward"),
        (6, 0, "backward"),
        (7, 1, "optimizer"),
        (9, 1, "between"),
        (10, 0, "validation"),
        (12, 1, "after"),
        (21, 1, "validation"),
    ]
    assert_survived(tmp_path, 2, "fsdp2", faults)


def test_with_sharded_state_a_body_may_have_several_steps_and_functions(tmp_path: Path) -> None:
    faults = [
        *((0, 1, "validation"), (4, 0, "forward"), (6, 0, "validation"), (13, 1, "optimizer")),
        *((16, 1, "between"), (19, 1, "backward"), (30, 0, "validation"), (33, 1, "after")),
    ]
    assert_survived(tmp_path, 2, "fsdp2 bodies", faults, redone=6)


def test_a_killed_node_costs_the_steps_since_the_last_snapshot_too(tmp_path: Path) -> None:
    # Also after the first step, with a worker of the partner's node lost at once, and with the node that serves the store.
    faults = [
        *((1, 2, "node forward"), (5, 1, "forward"), (6, 3, "node optimizer"), (12, 0, "forward")),
        *((13, 3, "node backward"), (16, 0, "node between")),
    ]
    folder = tmp_path / "hurt"
    folder.mkdir()
    port = free_port()

    def node(number: int) -> subprocess.Popen[str]:
        with (folder / f"said {number}").open("w") as said:
            return Popen(
                [
                    *(sys.executable, "-m", "rallypoint", "run", "--nnodes", "2:2", "--insecure"),
                    *("--nproc-per-node", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"),
                    *("--rdzv-id", "nodes", "--preload", "torch._dynamo", str(SCRIPT)),
                    *(str(folder), json.dumps(faults), "fsdp2", "4"),
                ],
                cwd=folder,
                stderr=said,
                text=True,
            )

    started = [node(0)]
    try:
        wait_until(lambda: listens(port), "a store")
        started += [node(number) for number in range(1, 6)]
        codes = [each.wait(150) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    said = "".join((folder / f"said {number}").read_text() for number in range(6))
    assert sorted(codes) == [-signal.SIGKILL] * 4 + [0, 0], said
    assert "restarting" not in said, said
    ends = [json.loads((folder / f"end {rank}").read_text()) for rank in range(4)]
    calm = undisturbed(SCRIPT, 4, "fsdp2", 4)
    for rank, (end, wanted) in enumerate(zip(ends, calm, strict=True)):
        for what in ("steps", "bits", "random", "rate", "score"):
            assert end[what] == wanted[what], f"rank {rank}: {what}"
        assert max(end["redone"], default=0) <= 4, ends


CHECKPOINTS = """
import os, random, sys, hashlib, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from rallypoint import elastic
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

kind, where, until = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
# Unequal parts, and with four ranks an empty one.
net = torch.nn.Sequential(torch.nn.Linear(6, 10 if "tp" in kind else 3), torch.nn.Dropout(0.3))
net.append(torch.nn.Linear(10 if "tp" in kind else 3, 5))
if kind == "fsdp2":
    fully_shard(net)
elif kind == "hsdp":
    fully_shard(net, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s")))
elif kind == "tp":
    parallelize_module(net, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
elif kind == "tp x dp":
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
torch.manual_seed(100 + (0 if kind == "tp" else rank))

def bits():
    found = hashlib.sha256()
    for each in net.parameters():
        state = optimizer.state[each]
        for one in (each, state["exp_avg"], state["exp_avg_sq"]):
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()

with elastic.session(net, optimizer, checkpoint=where, checkpoint_every=4, snapshot_every=3) as session:
    began = session.position
    if began:
        loaded = session.run(bits)
        assert loaded is not None
    while session.position < until:
        with session.step():
            x = torch.randn(4, 6)
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    ended = session.run(bits)
if rank == 0:
    print("began", began, loaded if began else "-", "ended", session.position, ended)
dist.destroy_process_group()
"""


def checkpointed(folder: Path, workers: int, kind: str, until: int) -> list[str]:
    """Number and bits of the first step and of the last."""
    (folder / "train.py").write_text(CHECKPOINTS)
    done = run(
        [
            *(sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", str(workers)),
            *("--preload", "torch._dynamo", "train.py", kind, "saved", str(until)),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "was not written" not in done.stderr, done.stderr
    # Four of these steps may take less time than writing a file. (The last file, which is loaded, is waited for.)
    assert done.stderr.count("is skipped, and later ones may be") <= 1, done.stderr
    _, began, loaded, _, ended, bits = done.stdout.split()
    return [began, loaded, ended, bits]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("fsdp2", (2, 3)),
        pytest.param("hsdp", (4, 2), marks=pytest.mark.long),
        pytest.param("tp", (2, 5), marks=pytest.mark.long),
        pytest.param("tp x dp", (4, 2), marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_is_loaded_by_as_many_ranks_and_by_others(
    tmp_path: Path, kind: str, workers: tuple[int, int]
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    *_, undisturbed = checkpointed(whole, workers[0], kind, 18)
    parts = tmp_path / "parts"
    parts.mkdir()
    # Each function counts as a step.
    *_, ended, bits = checkpointed(parts, workers[0], kind, 9)
    began, loaded, ended_again, end = checkpointed(parts, workers[0], kind, 20)
    assert (began, loaded) == (ended, bits)
    assert end == undisturbed
    began, loaded, _, _ = checkpointed(parts, workers[1], kind, 25)
    assert (began, loaded) == (ended_again, end)


FEW = [(2, 1, "forward"), (5, 0, "backward"), (9, 1, "after"), (13, 0, "between")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "kind"), [(4, "fsdp2"), (4, "hsdp"), (2, "tp"), (4, "tp x dp"), (2, "zero")]
)
def test_other_kinds_of_sharded_state_survive(tmp_path: Path, workers: int, kind: str) -> None:
    assert_survived(tmp_path, workers, kind, FEW)


@pytest.mark.parametrize(
    ("kind", "every", "faults"),
    [
        # Back to the first step, from one in which DDP's buckets have another layout.
        ("zero", 4, [(1, 1, "backward"), (6, 0, "forward")]),
        ("zero static", 4, [(2, 1, "backward"), (3, 0, "after")]),
        # Back to the second step, which has the first layout with a static graph.
        ("zero static", 1, [(1, 1, "after"), (2, 0, "backward"), (4, 2, "backward")]),
    ],
)
def test_a_step_from_before_ddp_had_its_layout_is_rounded_as_it_was(
    tmp_path: Path, kind: str, every: int, faults: list[Fault]
) -> None:
    assert_survived(tmp_path, 3, kind, faults, every=every)


OWN_LOOP = """
import os, pathlib, signal, sys, torch, torch.distributed as dist
from rallypoint import elastic
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
net = fully_shard(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.randn(10, 2, 4)
fault = pathlib.Path("fault")
with elastic.session(net, optimizer, snapshot_every=3) as session:
    try:
        for _ in session.batches(iter([1])):
            pass
    except elastic.ElasticError as error:
        if not session.history and dist.get_rank() == 0:
            print("refused:", error)
    while session.position < 8:
        with session.step():
            if session.position == 5 and dist.get_rank() == 1 and not fault.exists():
                fault.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            net(data[session.position]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    total = sum(each.to_local().sum().item() for each in net.parameters())
    if dist.get_rank() == 0:
        print("ended:", session.position, [each.redone for each in session.history], total)
dist.destroy_process_group()
"""


def test_a_loop_of_ones_own_goes_back_by_its_position(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_LOOP)
    done = run(
        [
            *(sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2"),
            *("--preload", "torch._dynamo", "train.py"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "refused: session.batches: a list_iterator can be iterated only once" in done.stdout
    assert "ended: 8 [2] " in done.stdout
    # Both ranks train on the same data, so one process comes to the same result.
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in torch.randn(10, 2, 4)[:8]:
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, bias = net.parameters()
    expected = weights[:2].sum() + bias[:2].sum()  # rank 0's part
    total = float(done.stdout.split()[-1])
    assert total == pytest.approx(expected.item(), rel=1e-4)
