"""Communication hooks of DDP with a state, and averages of models: a worker is lost, and the result is as if none had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainings import train, undisturbed


pytestmark = pytest.mark.integration

RANKS = 4
SCRIPT = """
import collections, json, sys, warnings
from faulty import FOLDER, die_at
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power, post_localSGD_hook as post
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

KIND = sys.argv[3]
warnings.simplefilter("ignore")

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
        self.early, self.late = nn.Linear(24, 24), nn.Linear(24, 24)
    def forward(self, x):
        return self.late(Faulty.apply(torch.tanh(self.early(x))))

# With Gloo, PowerSGD waits for itself if there are several buckets, also without a session.
net = DDP(Net(), bucket_cap_mb=25 if "power" in KIND else 0.001)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
more = []
if KIND == "power":
    state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    net.register_comm_hook(state, power.powerSGD_hook)
elif KIND == "cold power":
    state = power.PowerSGDState(None, 1, 2, use_error_feedback=False, warm_start=False)
    net.register_comm_hook(state, power.powerSGD_hook)
else:
    subgroup, _ = dist.new_subgroups(group_size=2)
    state = post.PostLocalSGDState(None, subgroup, 3)
    net.register_comm_hook(state, post.post_localSGD_hook)
    if KIND == "post":
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=4, warmup_steps=3))
    else:
        sizes = collections.OrderedDict([(2, 2), (4, 4)])
        averager = HierarchicalModelAverager(sizes, warmup_steps=3)
        more = [averager]
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
data = [torch.randn(8, 24) for _ in range(7)]

with elastic.session(net, optimizer, scheduler, *more, snapshot_every=3) as session:
    for epoch in session.epochs(2):
        for x in session.batches(data):
            with session.step():
                loss = net(x + rank).sub(torch.rand(1)).square().mean()
                fault("forward")
                loss.backward()
                fault("behind")
                optimizer.step()
                fault("stepped")
                for each in more:
                    each.average_parameters(net.parameters())
                optimizer.zero_grad()
                scheduler.step()
    if KIND == "power":
        assert state.error_dict and state.p_memory_dict
    end = [each.flatten().tolist() for each in net.parameters()]
    memory = [getattr(state, name, {}) for name in ("error_dict", "p_memory_dict", "q_memory_dict")]
    end += [each.tolist() for held in memory for each in held.values()]
    end += [scheduler.get_last_lr(), optimizer.param_groups[0]["lr"], session.position, state.iter]
    end += [each.step for each in more] or [getattr(getattr(optimizer, "averager", None), "step", 0)]
(FOLDER / f"end {rank}").write_text(json.dumps(end))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        # Before the compression starts, and after.
        ("power", [[1, 2, "backward"], [5, 1, "behind"], [10, 0, "backward"]]),
        ("cold power", [[1, 0, "forward"], [8, 3, "backward"]]),
        ("post", [[2, 1, "stepped"], [5, 3, "backward"], [9, 0, "behind"]]),
        ("averager", [[5, 2, "stepped"], [12, 1, "backward"]]),
    ],
)
def test_what_each_rank_has_for_itself_comes_back(
    tmp_path: Path, kind: str, faults: list[Any]
) -> None:
    calm = undisturbed(SCRIPT, RANKS, kind)
    ends, _ = train(tmp_path / "hurt", SCRIPT, RANKS, faults, kind)
    assert ends == calm
    if kind == "post":
        assert calm[0][0] != calm[2][0], "the ranks' parameters differ between two averages"
