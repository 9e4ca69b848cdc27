"""What torch.compile has made stays in use when a process is lost: no survivor compiles anything again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainings import train, undisturbed


pytestmark = pytest.mark.integration

WORKERS = 3
SCRIPT = """
import json, sys
from faulty import FOLDER, die_at
from rallypoint import elastic
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

KIND, BACKEND = sys.argv[3:]
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x).tanh()
        if KIND == "collective":
            # In the graph itself.
            x = x + functional.all_reduce(x.detach(), "sum", dist.group.WORLD).mean()
        return self.last(x)

def compiled(module):
    return torch.compile(module, backend=BACKEND)

inner = Net()
if KIND == "fsdp2":
    for each in (inner.first, inner.last, inner):
        fully_shard(each)
    net = compiled(inner)
elif KIND == "around":
    net = compiled(DDP(inner))
else:
    net = DDP(compiled(inner))
optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
data = [torch.randn(8, 8) for _ in range(12)]

def graphs():
    return counters["stats"]["unique_graphs"]

after_the_first = None
with elastic.session(net, optimizer, **({"snapshot_every": 3} if KIND == "fsdp2" else {})) as session:
    for x in session.batches(data):
        with session.step():
            loss = net(x + rank).square().mean()
            die_at(session.position, rank, "forward")
            loss.backward()
            die_at(session.position, rank, "backward")
            optimizer.step()
            optimizer.zero_grad()
        if after_the_first is None:
            after_the_first = graphs()
    end = [
        value
        for each in inner.parameters()
        for value in (each.full_tensor() if KIND == "fsdp2" else each).flatten().tolist()
    ]
    recovered = len(session.history)
(FOLDER / f"end {rank}").write_text(json.dumps([end, session.position]))
# A process that has lived all along has recovered from each loss.
(FOLDER / f"graphs {rank}").write_text(json.dumps([recovered, after_the_first, graphs()]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("within", "eager"),
        *(
            pytest.param(kind, "aot_eager", marks=pytest.mark.long)
            for kind in ("within", "around", "collective", "fsdp2")
        ),
    ],
)
def test_survivors_compile_nothing_again(tmp_path: Path, kind: str, backend: str) -> None:
    faults = [[2, 1, "forward"], [5, 0, "backward"], [8, 1, "backward"]]
    ends, _ = train(tmp_path / "job", SCRIPT, WORKERS, faults, kind, backend)
    assert ends == undisturbed(SCRIPT, WORKERS, kind, backend)
    lived_all_along, before, after = json.loads((tmp_path / "job" / "graphs 2").read_text())
    assert lived_all_along == len(faults)
    assert 0 < before == after
