"""Whatever trains in a session: optimizers, schedulers and modules of all kinds end bit-equal, whoever is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainings import train, undisturbed


pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(400)]

RANKS = 3
SCRIPT = """
import hashlib, json, warnings
from faulty import FOLDER, die_at
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR
from rallypoint import elastic

warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
optim = torch.optim


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0))
        self.register_buffer("none", None)
        self.register_buffer("bytes", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        self.bytes += 1
        return self.head(self.embedding(x)) * self.scale + self.empty.sum()


class WithHistory(optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                history = state["history"] = [*state.get("history", ()), each.grad.norm().item()][-3:]
                each.add_(each.grad, alpha=-group["lr"] * len(history))


def dense():
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1))


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, fused=True),
    "Adadelta": optim.Adadelta,
    "ASGD": optim.ASGD,
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": optim.Rprop,
    "Adafactor": optim.Adafactor,
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=4, history_size=3),
    "own": WithHistory,
    "rate": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "single": lambda p: optim.Adam(p, foreach=False),
    "fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}
SCHEDULERS = [
    lambda o: schedulers.StepLR(o, 2),
    lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=40),
    lambda o: schedulers.ExponentialLR(o, 0.9),
    lambda o: schedulers.CosineAnnealingLR(o, 7),
    lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    lambda o: schedulers.MultiStepLR(o, [2, 5]),
    lambda o: schedulers.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=False),
    lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.95),
    lambda o: schedulers.PolynomialLR(o, 20),
    schedulers.LinearLR,
    schedulers.ConstantLR,
    lambda o: schedulers.ChainedScheduler([schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)]),
    schedulers.LinearLR,
    lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    lambda o: SWALR(o, 0.02, anneal_epochs=5),
]
MODULES = {
    "tied": (Tied, optim.Adam, lambda net, x, step: net(torch.tensor([[step % 10, rank, 3]]))),
    "bfloat16": (lambda: dense().bfloat16(), optim.Adam, lambda net, x, step: net(x.bfloat16())),
    "complex": (
        lambda: nn.Linear(3, 2, dtype=torch.complex64),
        optim.Adam,
        lambda net, x, step: net(torch.complex(x[:, :3], x[:, 1:4])).abs(),
    ),
    "sparse": (
        lambda: nn.EmbeddingBag(20, 4, sparse=True),
        optim.SparseAdam,
        lambda net, x, step: net(torch.tensor([[step, rank, 3]])),
    ),
    "matrix": (
        lambda: nn.Linear(6, 6, bias=False),
        lambda p: optim.Muon(p, lr=0.01),
        lambda net, x, step: net(x[:, :6]),
    ),
    "norm": (
        lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)),
        optim.Adam,
        lambda net, x, step: net(x),
    ),
    "recurrent": (
        lambda: nn.GRU(4, 5, batch_first=True, dropout=0.2, num_layers=2),
        optim.Adam,
        lambda net, x, step: net(x.view(4, 2, 4))[0],
    ),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(8, 3)), optim.Adam, lambda net, x, step: net(x)
    ),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(8, 3)), optim.Adam, lambda net, x, step: net(x)
    ),
}
trained = []
for (name, make), schedule in zip(OPTIMIZERS.items(), SCHEDULERS, strict=True):
    net = DistributedDataParallel(dense())
    optimizer = make(net.parameters())
    forward = lambda net, x, step: net(x) - x.sum(1, keepdim=True)
    trained.append((name, net, optimizer, schedule(optimizer), forward))
for name, (make, make_optimizer, forward) in MODULES.items():
    net = DistributedDataParallel(make(), find_unused_parameters=name == "tied")
    trained.append((name, net, make_optimizer(net.parameters()), None, forward))


def digest(state):
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            value = value.detach().to_dense() if value.is_sparse else value.detach()
            found.update(f"{value.dtype} {value.tolist()}".encode())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        elif not callable(value):
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()[:12]


objects = [each for _, *some, _ in trained for each in some if each is not None]
with elastic.session(*objects) as session:
    while session.position < 10:
        with session.step():
            step = session.position
            die_at(step, rank)
            for number, (name, net, optimizer, scheduler, forward) in enumerate(trained):
                x = torch.sin(torch.arange(32.0).view(4, 8) * (step + 1) * (rank + 1 + number))

                def loss():
                    optimizer.zero_grad()
                    value = forward(net, x, step).pow(2).mean()
                    value.backward()
                    return value

                if name == "LBFGS":
                    optimizer.step(loss)
                else:
                    loss()
                    optimizer.step()
                    optimizer.zero_grad()
                if isinstance(scheduler, schedulers.ReduceLROnPlateau):
                    scheduler.step(float(step % 3))
                elif scheduler is not None:
                    scheduler.step()
end = {
    name: [digest(each.state_dict()) for each in some if each is not None] for name, *some, _ in trained
}
(FOLDER / f"end {rank}").write_text(json.dumps(end))
dist.destroy_process_group()
"""


def test_all_optimizers_schedulers_and_kinds_of_modules_end_as_without_a_loss(
    tmp_path: Path,
) -> None:
    hurt, _ = train(tmp_path / "hurt", SCRIPT, RANKS, [(1, 0), (2, 1), (4, 2), (7, 1)])
    for rank, (mine, wanted) in enumerate(zip(hurt, undisturbed(SCRIPT, RANKS), strict=True)):
        for name in wanted:
            assert mine[name] == wanted[name], f"rank {rank}: {name}"
