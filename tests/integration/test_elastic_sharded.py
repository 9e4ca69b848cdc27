"""Sessions with sharded state: workers are killed, all ranks go back to a snapshot, and the end equals that without a loss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic import free_port, listens, wait_until
from supervisors import Popen, run


pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[1] / "sharded_train.py"
Fault = tuple[int, int, str]


def trained(
    folder: Path, workers: int, kind: str, faults: list[Fault], every: int = 4
) -> tuple[str, list[dict[str, Any]]]:
    folder.mkdir()
    done = run(
        [
            *(sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", str(workers)),
            *("--preload", "torch._dynamo", str(SCRIPT), str(folder), kind),
            *(json.dumps(faults), str(every)),
        ],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "RALLY_LOG"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    ends = [json.loads((folder / f"end {rank}").read_text()) for rank in range(workers)]
    return done.stderr, ends


def assert_survived(
    tmp_path: Path, workers: int, kind: str, faults: list[Fault], redone: int = 4
) -> None:
    _, calm = trained(tmp_path / "calm", workers, kind, [])
    said, ends = trained(tmp_path / "hurt", workers, kind, faults)
    assert said.count("takes its place, the others keep theirs") == len(faults)
    for rank, (end, wanted) in enumerate(zip(ends, calm, strict=True)):
        for what in ("steps", "bits", "random", "rate", "score"):
            assert end[what] == wanted[what], f"rank {rank}: {what}"
        assert end["pid"], "objects and process are those of the beginning"
        assert max(end["redone"], default=0) <= redone
    # A process has seen the losses since it took its rank over.
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
    _, calm = trained(tmp_path / "calm", 4, "fsdp2", [])
    # Also behind the first step, with a worker of the partner's node lost at once, and of the node that serves the store.
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
                    *(str(folder), "fsdp2", json.dumps(faults), "4"),
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
    for rank, (end, wanted) in enumerate(zip(ends, calm, strict=True)):
        for what in ("steps", "bits", "random", "rate", "score"):
            assert end[what] == wanted[what], f"rank {rank}: {what}"
        assert max(end["redone"], default=0) <= 4, ends


FEW = [(2, 1, "forward"), (5, 0, "backward"), (9, 1, "after"), (13, 0, "between")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "kind"), [(4, "fsdp2"), (4, "hsdp"), (2, "tp"), (4, "tp x dp"), (2, "zero")]
)
def test_other_kinds_of_sharded_state_survive(tmp_path: Path, workers: int, kind: str) -> None:
    assert_survived(tmp_path, workers, kind, FEW)


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
    # Both ranks train on the same data, so one process comes to the same.
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in torch.randn(10, 2, 4)[:8]:
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, bias = net.parameters()
    expected = weights[:2].sum() + bias[:2].sum()  # the part of rank 0
    total = float(done.stdout.split()[-1])
    assert total == pytest.approx(expected.item(), rel=1e-4)
