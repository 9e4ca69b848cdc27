"""A DDP module with a static graph goes on when a process is lost, whenever and whichever rank, and ends as if none had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainings import train, undisturbed


pytestmark = pytest.mark.integration

SCRIPT = """
import gc, json, sys, time, weakref
from faulty import FAULTS, FOLDER, die_at
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

WAY = sys.argv[3]

def fault(where):
    die_at(session.position, rank, where)

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        fault("backward")
        return grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(16, 16), nn.Linear(16, 16)
        self.twice = nn.Linear(16, 16)
        self.of_one, self.of_nobody = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, x):
        x = self.twice(torch.tanh(self.early(x)))
        x = Faulty.apply(x)
        x = self.twice(torch.tanh(x)) + (self.of_one(x) if rank == 2 else 0)
        return self.late(torch.tanh(x))

views = WAY == "views"
nets = [
    DDP(Net(), static_graph=True, bucket_cap_mb=0.001, gradient_as_bucket_view=views) for _ in range(2)
]
if WAY == "hook":
    nets[0].register_comm_hook(None, fp16_compress_hook)
optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in nets]
data = [torch.randn(8, 16) for _ in range(4)]

def is_behind():
    global waits
    waits, first = False, waits
    return first

waits = WAY == "one ahead" and bool(FAULTS) and rank > 0

def train(number, x):
    loss = nets[number](x + rank).sub(number).square().mean()
    fault("forward")
    loss.backward()
    fault("behind")
    if number == 0 and is_behind():
        # The first step fails here for all but rank 0, which has completed it and died in the next.
        while not list(FOLDER.glob("fault *")):
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1))
    optimizers[number].step()
    fault("stepped")
    optimizers[number].zero_grad()

with elastic.session(*nets, *optimizers) as session:
    for epoch in session.epochs(2):
        for x in session.batches(data):
            with session.step():
                train(0, x)
            if WAY in {"two steps", "one ahead"}:
                with session.step():
                    train(1, x)
    # Before a module's layout is settled, rounding would tell a different one.
    assert nets[0]._has_rebuilt_buckets and len(nets[0].reducer._get_zeros_like_grad_buckets()) > 2
    end = [value for net in nets for each in net.parameters() for value in each.flatten().tolist()]
(FOLDER / f"end {rank}").write_text(json.dumps([end, session.position]))
dist.destroy_process_group()
module = weakref.ref(nets[0].module)
del nets, optimizers, session, x, epoch
gc.collect()
assert module() is None, "the session's model stays"
"""


@pytest.mark.parametrize(
    ("way", "faults"),
    [
        # In the first pass, all start again. In the second step and the one after it, nobody has the layout yet.
        ("plain", [[0, 1, "backward"], [1, 0, "forward"], [2, 1, "backward"], [6, 0, "stepped"]]),
        ("plain", [[0, 0, "behind"], [1, 2, "behind"], [2, 0, "stepped"], [4, 1, "forward"]]),
        # Two at once.
        ("views", [[1, 0, "backward"], [1, 1, "backward"], [5, 0, "backward"]]),
        ("hook", [[0, 2, "forward"], [3, 0, "backward"]]),
        ("two steps", [[1, 0, "backward"], [3, 1, "forward"], [11, 0, "behind"]]),
        # The others rehearse the rest of the body, with the second module's first pass in it.
        ("one ahead", [[1, 0, "backward"]]),
    ],
)
def test_a_static_graph_is_kept(tmp_path: Path, way: str, faults: list[Any]) -> None:
    ends, _ = train(tmp_path / "job", SCRIPT, 3, faults, way)
    assert ends == undisturbed(SCRIPT, 3, way)
