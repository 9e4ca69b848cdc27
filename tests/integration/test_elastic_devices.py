"""Sessions on CPUs and GPUs, over Gloo and NCCL: workers are killed, and the result is bit-equal to a run without a loss."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from supervisors import run
from trainings import train, undisturbed


pytestmark = pytest.mark.integration
GPU = (
    pytest.mark.gpu,
    # Not is_available(): it asks the driver for things that a fork of this process cannot use.
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
)

SCRIPT = Path(__file__).parents[1] / "device_train.py"
Fault = tuple[int, int, str]
FAULTS: list[Fault] = [
    *((0, 1, "forward"), (1, 1, "backward"), (5, 0, "optimizer"), (7, 1, "after")),
    *((9, 0, "between"), (16, 0, "validation"), (21, 0, "backward")),
]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("cpu gloo", 2),
        # Over a stand-in for NCCL.
        ("cpu nccl static", 3),
        ("cpu nccl fsdp2", 2),
        pytest.param("cuda gloo", 2, marks=GPU),
        pytest.param("cuda nccl", 2, marks=GPU),
        pytest.param("cuda cpu:gloo,cuda:nccl", 2, marks=GPU),
        pytest.param("cuda nccl static fused", 3, marks=GPU),
        pytest.param("cuda nccl scaler", 2, marks=GPU),
        pytest.param("cuda nccl sync", 2, marks=GPU),
        pytest.param("cuda nccl fsdp2", 2, marks=GPU),
    ],
)
def test_killed_workers_cost_nothing_but_a_moment(tmp_path: Path, kind: str, workers: int) -> None:
    ends, _ = train(tmp_path / "hurt", SCRIPT, workers, FAULTS, kind)
    for rank, (end, wanted) in enumerate(
        zip(ends, undisturbed(SCRIPT, workers, kind), strict=True)
    ):
        for what in ("steps", "bits", "random", "rate", "scale", "score"):
            assert end[what] == wanted[what], f"rank {rank}: {what}"
        assert end["same process"]
        assert not end["threads"], "a group of an older generation is still there"
    print(kind, [end["recoveries"] for end in ends])


@pytest.mark.parametrize("kind", ["cpu gloo", pytest.param("cuda nccl", marks=GPU)])
def test_a_spare_takes_over(tmp_path: Path, kind: str) -> None:
    faults = [(5, 0, "optimizer"), (13, 1, "backward")]
    ends, said = train(tmp_path / "hurt", SCRIPT, 2, faults, kind, flags=["--spares", "1"])
    for rank, (end, wanted) in enumerate(zip(ends, undisturbed(SCRIPT, 2, kind), strict=True)):
        assert end["bits"] == wanted["bits"], f"rank {rank}: {said}"
    print(kind, [end["recoveries"] for end in ends])


HANGS = """
import os, sys, threading
from datetime import timedelta
os.environ["NCCL_HOSTID"] = f"host of rank {os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
from rallypoint import elastic
import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl", timeout=timedelta(seconds=20))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[0])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with elastic.session(net, optimizer) as session:
    while session.position < 3:
        with session.step():
            if sys.argv[1] == "hang" and session.position == 2 and dist.get_rank() == 1:
                threading.Event().wait()
            net(torch.ones(4, device="cuda")).sum().backward()
            optimizer.step()
print("trained")
# Not destroyed: torch complains, and the process ends.
"""


def on_gpus(tmp_path: Path, word: str, *flags: str) -> Any:
    script = tmp_path / "train.py"
    script.write_text(HANGS)
    return run(
        [
            *(sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2", *flags),
            *(str(script), word),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=GPU)])
def test_a_process_ends_with_a_group_over_nccl(tmp_path: Path, kind: str) -> None:
    done = on_gpus(tmp_path, "end")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2


@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=GPU)])
def test_a_collective_over_nccl_that_never_ends_is_given_up(tmp_path: Path, kind: str) -> None:
    done = on_gpus(tmp_path, "hang", "--max-losses", "0")
    assert done.returncode != 0
    assert "timed out after 20 s, waiting for a collective of group '0' to end" in done.stderr
