"""Join in a session: within a step, a loss is recovered from; around steps, it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainings import train, undisturbed


pytestmark = pytest.mark.integration

SCRIPT = """
import json
from faulty import FAULTS, FOLDER, die_at
from rallypoint import elastic
from rallypoint.errors import ElasticError
from rallypoint.join import Join
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel as DDP

# Places: step, rank, micro-batch, where.
def fault(number, where):
    die_at(session.position, rank, number, where)

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
net = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
mine = [torch.randn(4, 4, generator=generator) for _ in range(3)]
told = []

def refused(block):
    try:
        with block:
            with session.step():
                pass
    except ElasticError as error:
        told.append(str(error))

def train(batches):
    for number, x in enumerate(batches):
        loss = net(x).square().mean()
        fault(number, "forward")
        loss.backward()
        fault(number, "behind")

with elastic.session(net, optimizer) as session:
    for way in session.batches(["replayed", "hooks", "steps"] * 2):
        some = mine[: 1 + (session.position + rank) % 3]
        with session.step():
            if way == "replayed":
                with Join([net], weighting="samples") as join:
                    train(join.batches(some))
            else:
                with Join([net], steps=len(some) if way == "steps" else None):
                    train(some)
            optimizer.step()
            optimizer.zero_grad()
    if not FAULTS:
        refused(Join([net]))
        refused(Join([net, optimizer], steps=1))
        refused(TorchJoin([net]))
    end = [value for each in net.parameters() for value in each.flatten().tolist()]
(FOLDER / f"end {rank}").write_text(json.dumps([end, session.position, told]))
dist.destroy_process_group()
"""


def test_join_within_a_step_is_recovered_from_and_around_steps_refused(tmp_path: Path) -> None:
    # Other ranks have run out at some of these places.
    faults = [[0, 0, 0, "forward"], [1, 1, 2, "behind"], [2, 2, 1, "forward"], [4, 2, 0, "behind"]]
    ends, _ = train(tmp_path / "job", SCRIPT, 3, faults)
    calm = undisturbed(SCRIPT, 3)
    assert [each[:2] for each in ends] == [each[:2] for each in calm]
    for _, _, told in calm:
        assert len(told) == 3
        assert all("Open the block within the step" in each for each in told)
