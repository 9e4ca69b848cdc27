"""Sessions whose steps or ranks need each rank's whole state, in snapshots or as copies: the result is as without a loss."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from trainings import start, train, undisturbed


pytestmark = pytest.mark.integration

RANKS = 3
SCRIPT = """
import json, sys
from faulty import FOLDER, die_at
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

KIND = sys.argv[3]

def fault(where):
    die_at(session.position, rank, where)

def average(tensors):
    for each in tensors:
        dist.all_reduce(each)  # the place
        each /= dist.get_world_size()

def net_of():
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16))

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
if KIND == "apart":
    torch.manual_seed(rank)
is_static = KIND == "static"
nets = [net_of() for _ in range(2 if "two" in sys.argv else 1)]
if KIND != "apart" and "late" not in sys.argv:
    nets = [DDP(each, bucket_cap_mb=0.001, static_graph=is_static) for each in nets]
make = (lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)) if KIND == "lbfgs" else torch.optim.AdamW
optimizers = [make(each.parameters()) for each in nets]
torch.manual_seed(100 + rank)
data = [torch.randn(8, 16, generator=torch.Generator().manual_seed(each)) for each in range(6)]

def loss_of(net, x):
    return net(x + rank).sub(torch.rand(1)).square().mean()

def lbfgs(x):
    def closure():
        optimizers[0].zero_grad()
        loss = loss_of(nets[0], x)
        loss.backward()
        fault("within")
        return loss
    optimizers[0].step(closure)

def sharp(x):
    parameters = list(nets[0].parameters())
    loss_of(nets[0], x).backward()
    with torch.no_grad():
        before = [each.clone() for each in parameters]
        for each in parameters:
            each.data += 0.05 * each.grad / each.grad.norm()  # does not count as a change of it
    optimizers[0].zero_grad()
    fault("within")
    loss_of(nets[0], x).backward()
    with torch.no_grad():
        for each, held in zip(parameters, before):
            each.copy_(held)
    optimizers[0].step()

def two(x):
    for number, optimizer in enumerate(optimizers):
        loss = loss_of(nets[0], x) if number else nets[1](nets[0](x).detach()).square().mean()
        loss.backward()
        fault("within" if number else "begin")
        optimizer.step()

def apart(x):
    loss_of(nets[0], x).backward()
    if session.position % 3 == 1:
        average([each.grad for each in nets[0].parameters()])
    fault("within")
    optimizers[0].step()

def late(x):
    loss_of(nets[0], x).backward()
    optimizers[0].step()
    fault("within")
    average([each.data for each in nets[0].parameters()])

def seldom(x):
    loss_of(nets[0], x).backward()
    optimizers[0].step()
    if session.position % 4 == 3:
        fault("within")
        optimizers[0].zero_grad()
        loss_of(nets[0], x).backward()
        optimizers[0].step()

def plain(x):
    loss_of(nets[0], x).backward()
    fault("within")
    optimizers[0].step()

step = globals().get(KIND, plain)
wants = {} if KIND in ("lbfgs", "default") else {"snapshots": True}
if KIND == "default":
    step = globals()[sys.argv[4]]
with elastic.session(*nets, *optimizers, snapshot_every=3, **wants) as session:
    for epoch in session.epochs(2):
        for x in session.batches(data):
            with session.step():
                step(x)
                fault("behind")
                for optimizer in optimizers:
                    optimizer.zero_grad()
    end = [each.flatten().tolist() for net in nets for each in net.parameters()]
    end += [torch.rand(1).item(), session.position]
(FOLDER / f"end {rank}").write_text(json.dumps(end))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["lbfgs", "sharp", "two", "apart", "late", "static"])
def test_whatever_a_step_does_the_end_is_that_without_a_loss(tmp_path: Path, kind: str) -> None:
    draws = random.Random(kind)
    steps = [1, draws.randrange(2, 6), draws.randrange(6, 12)]
    faults = [[step, draws.randrange(RANKS), "within"] for step in steps]
    faults[2][2] = draws.choice(["within", "behind"])
    calm = undisturbed(SCRIPT, RANKS, kind)
    ends, said = train(tmp_path / "hurt", SCRIPT, RANKS, faults, kind)
    assert ends == calm
    # Nor is the session's own communication taken for the script's.
    assert "after a change" not in said and "outside of a step" not in said
    if kind == "apart":
        assert calm[0][0] != calm[1][0]


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("sharp", (1, 4, 9)), ("two", (1, 4, 9)), ("seldom", (7, 11))],
)
def test_a_step_that_communicates_behind_a_change_is_undone(
    tmp_path: Path, kind: str, steps: tuple[int, ...]
) -> None:
    draws = random.Random(kind)
    faults = [[step, draws.randrange(RANKS), "within"] for step in steps]
    calm = undisturbed(SCRIPT, RANKS, "default", kind)
    ends, said = train(tmp_path / "hurt", SCRIPT, RANKS, faults, "default", kind)
    assert ends == calm
    assert "complete step" not in said  # nothing is redone but the step under way


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        # DDP settles its buckets in the second forward pass.
        ("sharp", "return net(x + rank)"),
        ("late", "dist.all_reduce(each)  # the place"),
        ("two", 'loss.backward()\n        fault("within" if'),
        ("plain", ""),
    ],
)
def test_a_step_that_needs_a_copy_is_named_before_a_loss(
    tmp_path: Path, kind: str, place: str
) -> None:
    done = start(tmp_path / "job", SCRIPT, RANKS, [], "default", kind)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "after a change of parameters" in line]
    if not place:
        assert not lines
        return
    (line,) = lines
    number = SCRIPT[: SCRIPT.index(place)].count("\n") + 1
    assert f"train.py:{number} communicates (" in line
    if kind == "late":
        assert (
            "the first collective of that step: each rank changes its parameters by itself" in line
        )
        assert "Use elastic.session(…, snapshots=True)" in line
    else:
        assert "each step begins with a copy of what the session holds (0.0 MB)" in line
