"""Whole replicas of several ranks are lost and arrive: models over meshes go on in the same processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from resized_job import Job


pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SAMPLES, BATCH, EPOCHS = 300, 12, 2
# Newcomers meet the others while those train: this is far enough for that, and before the end.
FAR = 44
SCRIPT = """
import json, os, pathlib, sys, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.utils.data import DataLoader
from rallypoint import elastic
from rallypoint.parallel import ParallelLayout, ParallelMesh

folder, way, samples, batch_size, epochs = pathlib.Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
PAUSE = 3 * float(os.environ["PAUSE"])  # FAR is only a few steps away
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "inner"))
sharing = None
if way == "hsdp":
    for each in (net[0], net[2], net):
        fully_shard(each, mesh=mesh)
elif way == "named":
    named = ParallelMesh(ParallelLayout(tp=2)).build()
    net = torch.nn.parallel.DistributedDataParallel(net)
elif way == "tp":
    parallelize_module(net, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    net = replicate(net, mesh=mesh["dp"])
    sharing = mesh["dp"].get_group()
# One call for all parameters, where these are alike: as DTensors, each takes long.
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, foreach=way == "hsdp")
sampler = elastic.Sampler(samples, batch_size=batch_size, seed=3, group=sharing)
loader = DataLoader(range(samples), batch_sampler=sampler)
session = elastic.session(
    net, optimizer, snapshot_every=4, checkpoint=folder / "checkpoints", checkpoint_every=15
)
sizes = []
session.on_resize(lambda before, now: sizes.append([before, now]), in_place=True)
log = open(folder / f"log {os.getpid()}", "a", buffering=1)

def data(indices):
    x = torch.stack([torch.sin(indices * (k + 1.0)) for k in range(4)], 1).double()
    return x, x.sum(1, keepdim=True)

with session:
    for epoch in session.epochs(epochs):
        for indices in session.batches(loader):
            position = session.position
            with session.step():
                x, y = data(indices)
                whole = torch.tensor([float(len(x))])
                dist.all_reduce(whole, group=sharing)
                loss = ((net(x) - y) ** 2).sum() * dist.get_world_size(sharing) / whole.item()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if way == "named":
                    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
                    dist.all_gather(ranks, torch.tensor([dist.get_rank()]), group=named.group("tp"))
                    assert tuple(map(int, ranks)) == named.peers("tp"), (ranks, named)
                    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(named.degree("dp"))]
                    dist.all_gather(ranks, torch.tensor([dist.get_rank()]), group=named.group("dp"))
                    assert tuple(map(int, ranks)) == named.peers("dp"), (ranks, named)
            if session.position > position:
                told = {"step": position, "rank": dist.get_rank(), "size": dist.get_world_size(),
                        "mesh": [list(mesh.shape), list(mesh.get_coordinate()), mesh.mesh.tolist()],
                        "samples": indices.tolist(), "sizes": sizes}
                print(json.dumps(told), file=log)
            (folder / f"new {os.getpid()}").write_text(f"{session.position}")
            os.replace(folder / f"new {os.getpid()}", folder / f"at {os.getpid()}")
            while session.position >= (end := int((folder / "wait").read_text())):
                time.sleep(0.02)
            time.sleep(PAUSE if end < 1 << 30 else 0.0)
parameters = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in net.parameters()]
if dist.get_rank() == 0:
    torch.save([each.detach() for each in parameters], folder / "end.pt")
dist.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    made: list[Job] = []

    def make(way: str) -> Job:
        made.append(Job(tmp_path, 1, 3, SCRIPT, (way, SAMPLES, BATCH, EPOCHS)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def one_process() -> list[torch.Tensor]:
    """The parameters after the same training in one process."""
    from rallypoint import elastic

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    net = net.double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sampler = elastic.Sampler(SAMPLES, batch_size=BATCH, seed=3)
    for epoch in range(EPOCHS):
        sampler.begin_at(epoch)
        for batch in sampler:
            indices = torch.tensor(batch)
            x = torch.stack([torch.sin(indices * (k + 1.0)) for k in range(4)], 1).double()
            ((net(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in net.parameters()]


@pytest.mark.parametrize(
    ("way", "lost"),
    [
        ("hsdp", 1),
        pytest.param("tp", 0, marks=pytest.mark.long),
        pytest.param("named", 1, marks=pytest.mark.long),
    ],
)
def test_whole_replicas_are_lost_and_come(
    job: Callable[[str], Job], tmp_path: Path, way: str, lost: int
) -> None:
    it = job(way)
    it.hold_at(10)
    for _ in range(3):
        it.start()
    it.wait(lambda: len(it.at(10)) == 6, "six ranks train")
    before = set(it.steps())
    it.kill(it.nodes[lost])
    it.hold_at(20)
    it.wait(lambda: len(it.at(20)) == 4, "four ranks go on")
    survivors = set(it.steps())
    assert survivors < before, it.output()
    assert {str(each["mesh"][0]) for each in it.told() if each["step"] == 19} == {"[2, 2]"}
    it.start()
    it.hold_at(FAR)
    it.wait(lambda: len(it.steps()) == 6, "six ranks again")
    assert survivors < set(it.steps()), it.output()
    it.go_on()
    for node in it.nodes:
        node.wait(120)
    told = it.told()
    last = [each for each in told if each["step"] == told[-1]["step"]]
    assert [each["rank"] for each in last] == list(range(6))
    whole = [[0, 1], [2, 3], [4, 5]]
    assert [each["mesh"] for each in last] == [
        [[3, 2], [rank // 2, rank % 2], whole] for rank in range(6)
    ]
    check_end(tmp_path)
    # The last checkpoint is one of all the ranks, for another number of ranks.
    (tmp_path / "end.pt").unlink()
    it.words[it.words.index("lease=10")] = "lease=10,last_call=0.5"
    it.start().wait(120)
    check_end(tmp_path)


def check_end(folder: Path) -> None:
    for mine, theirs in zip(torch.load(folder / "end.pt"), one_process(), strict=True):
        torch.testing.assert_close(mine, theirs)
