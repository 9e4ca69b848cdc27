"""What modules hold besides parameters is the same at the end, whoever was lost and whatever was left half done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainings import start, train, undisturbed


pytestmark = pytest.mark.integration

# Steps 0 to 3 and the validation 4, then 5 to 8 and 9, then 10 to 13 and 14.
SCRIPT = """
import json, sys
from datetime import timedelta
from faulty import FOLDER, die_at
from rallypoint import elastic
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel as DDP

IS_PUT_BACK = sys.argv[3] == "put back"

def fault(where):
    die_at(session.position, rank, where)

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

class Unfrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.back, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x):
        return self.head(self.back(x).tanh())

class Assigned(nn.Module):
    # DDP allows a forward pass to assign another buffer.
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("last", None)
        self.register_buffer("recent", torch.zeros(1, 4))
    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        self.last = x[-1] * 1.0
        self.recent = torch.cat([self.recent, x[:1]])[-3:]
        return self.lin(x - self.average - 0.1 * self.recent.mean(0))

class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.count = nn.Linear(4, 2), 0
    def get_extra_state(self):
        return {"count": self.count}
    def set_extra_state(self, state):
        self.count = state["count"]
    def forward(self, x):
        self.count += 1
        return self.lin(x) / self.count

class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 2, sparse=True)
    def forward(self, x):
        return self.embedding(torch.arange(8)[: len(x)] % 5)

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.seldom = nn.Linear(4, 2), nn.Linear(4, 2)
    def forward(self, x):
        return self.lin(x) + (self.seldom(x) if session.position % 4 == 0 else 0.0)

nets = {
    "heads": Heads(),
    "swapped": nn.Linear(4, 2),
    "sparse": Sparse(),
    "grown": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
    "extra": Extra(),
    "assigned": Assigned(),
    "mode": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
    "unfrozen": Unfrozen(),
}
nets = {name: DDP(net, find_unused_parameters=name in ("unfrozen", "heads")) for name, net in nets.items()}
nets["unfrozen"].module.back.requires_grad_(False)
optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.05) for name, net in nets.items()}
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers["mode"], lambda step: np.cos(step / 20))
# A gradient of zeros is no missing one for it.
optimizers["heads"] = torch.optim.SGD(
    nets["heads"].parameters(), lr=0.05, momentum=0.9, weight_decay=0.1
)
optimizers["grown"] = torch.optim.Adam(nets["grown"].module[1].parameters())
# Of no module.
temperature = torch.ones(1, requires_grad=True)
optimizers["temperature"] = torch.optim.SGD([temperature], lr=0.02)
mode, average = nets["mode"], torch.zeros(2, 4)
data = [torch.randn(8, 4) for _ in range(4)]

def validate():
    # As it is written usually: nothing is put back if it is interrupted.
    was = mode.training
    mode.eval()
    score = mode(data[0]).sum().detach()
    weight = nets["swapped"].module.weight
    stored = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.copy_(average)
        score += weight.sum().detach()
        fault("validation")
        dist.all_reduce(score)
    finally:
        if IS_PUT_BACK or sys.exception() is None:
            with torch.no_grad():
                weight.copy_(stored)
    mode.train(was)

def evaluate():
    was = mode.training
    mode.eval()
    session.run(validate)
    mode.train(was)

with elastic.session(*nets.values(), *optimizers.values(), scheduler) as session:
    for epoch in session.epochs(3):
        if epoch == 1:
            nets["unfrozen"].module.back.requires_grad_(True)
            added = nets["grown"].module[0].parameters()
            optimizers["grown"].add_param_group({"params": list(added), "lr": 0.01})
        for x in session.batches(data):
            with session.step():
                if session.position == 0:  # as torchtitan does, behind the first step
                    _set_pg_timeout(timedelta(seconds=2000))
                x = x + rank
                loss = sum(net(x).sub(1).square().mean() for net in nets.values())
                loss = loss * (1 + (temperature - x.mean()).square().sum() / 100)
                fault("backward")
                if len(session.history) > 1:
                    fault("backward again")
                loss.backward()
                dist.all_reduce(temperature.grad)
                fault("behind")
                for each in optimizers.values():
                    each.step()
                for name, net in nets.items():
                    net.zero_grad(set_to_none=name != "heads")
                optimizers["temperature"].zero_grad()
                scheduler.step()
        session.run(validate) if epoch != 1 else evaluate()
    end = {
        name: [
            value
            for each in (*net.parameters(), *net.buffers())
            for value in each.flatten().tolist()
        ]
        for name, net in nets.items()
    }
    end["temperature"] = temperature.item()
    end["steps"] = session.position
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    end["timeout"] = backend.options._timeout.total_seconds()
    end["count"] = nets["extra"].module.count
    end["rate"] = scheduler.get_last_lr()[0]
    end["flags"] = [[each.training for each in net.modules()] for net in nets.values()]
    end["trained"] = [[each.requires_grad for each in net.parameters()] for net in nets.values()]
(FOLDER / f"end {rank}").write_text(json.dumps(end))
dist.destroy_process_group()
"""
FAULTS = [
    [1, 1, "backward"],
    [2, 1, "backward"],
    [2, 0, "backward again"],  # the others have had no backward pass since
    [4, 1, "validation"],
    [7, 0, "behind"],
    [9, 0, "validation"],
    [11, 1, "backward"],
]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ends, _ = train(tmp_path_factory.mktemp("jobs") / "disturbed", SCRIPT, 2, FAULTS, "put back")
    return ends


@pytest.mark.parametrize(
    "name",
    [
        "steps",
        "timeout",
        "rate",
        "flags",
        "trained",
        "mode",
        "unfrozen",
        "assigned",
        "extra",
        "count",
        "sparse",
        "grown",
        "swapped",
        "heads",
        "temperature",
    ],
)
def test_the_end_is_that_of_a_run_without_losses(
    name: str, disturbed: list[dict[str, Any]]
) -> None:
    for rank, end in enumerate(undisturbed(SCRIPT, 2, "put back")):
        assert disturbed[rank][name] == end[name], f"rank {rank}"


def test_weights_that_a_function_has_left_swapped_are_no_state_to_go_on_from(
    tmp_path: Path,
) -> None:
    done = start(tmp_path / "job", SCRIPT, 2, [[4, 1, "validation"]], "not put back")
    assert done.returncode == 1
    assert "put them back in a `finally` block" in " ".join(done.stderr.split())
