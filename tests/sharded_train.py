"""A training script whose state is sharded, for the tests of sessions: run by `rally run`, with faults at given places.

sharded_train.py FOLDER FAULTS KIND [snapshot_every]

A fault "node forward" kills the supervisor, and with it the whole node. If KIND ends with " bodies", a batch has two steps,
and some batches have functions before and between them.
"""

import hashlib
import json
import os
import pathlib
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from faulty import FOLDER, die_at
from rallypoint import elastic


KIND = sys.argv[3].removesuffix(" bodies")
HAS_BODIES = sys.argv[3].endswith(" bodies")
EVERY = int(sys.argv[4]) if len(sys.argv) > 4 else None


def command(pid: int) -> bytes:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")


def supervisor() -> int:
    pid = os.getpid()
    while b"rallypoint run" not in command(pid):
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def fault(where: str) -> None:
    place = session.position, dist.get_rank()
    die_at(*place, where)
    die_at(*place, f"node {where}", of=supervisor)


def block() -> torch.nn.Module:
    # Tensor parallelism needs equal parts; FSDP's may be unequal or empty.
    wide = 34 if "tp" in KIND else 33
    return torch.nn.Sequential(
        torch.nn.Linear(18, wide), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(wide, 18)
    )


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(2))
        self.norm = torch.nn.BatchNorm1d(18)
        self.last = torch.nn.Linear(18, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, each in enumerate(self.blocks):
            x = x + each(x)
            if number == 0:
                fault("forward")
        return self.last(self.norm(x))


def tensor_parallel(net: Net, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for each in net.blocks:
        parallelize_module(each, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})


torch.manual_seed(0)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
net: Any = Net()
parts: list[Any] = []
match KIND:
    case "fsdp2":
        for each in net.blocks:
            fully_shard(each)
        fully_shard(net)
    case "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))
        for each in net.blocks:
            fully_shard(each, mesh=mesh)
        fully_shard(net, mesh=mesh)
    case "tp":
        tensor_parallel(net, init_device_mesh("cpu", (size,)))
    case "tp x dp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(net, mesh["tp"])
        for each in (*net.blocks, net):
            fully_shard(each, mesh=mesh["dp"])
    case "zero" | "zero static":
        # Small buckets: DDP's first bucket layout differs from the later one.
        is_static = KIND == "zero static"
        net = DistributedDataParallel(net, bucket_cap_mb=0.004, static_graph=is_static)
is_alike = KIND == "tp"  # all ranks train on the same batches
if KIND.startswith("zero"):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer: Any = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=1e-2)
else:
    # One call for all parameters, where these are alike: as DTensors, each takes long.
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, fused="tp" not in KIND)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
data = torch.utils.data.TensorDataset(torch.randn(80, 18), torch.randint(5, (80,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
torch.manual_seed(100 + (0 if is_alike else rank))
random.seed(0 if is_alike else rank)
seen, pid, first = 0, os.getpid(), id(optimizer)
scores = []
with elastic.session(net, optimizer, scheduler, snapshot_every=EVERY) as session:
    inner = net.module if KIND.startswith("zero") else net
    inner.blocks[1].register_full_backward_hook(lambda *_: fault("backward"))
    optimizer.register_step_pre_hook(lambda *_: fault("optimizer"))
    optimizer.register_step_post_hook(lambda *_: fault("after"))

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        global seen
        fault("begin")
        seen += 1
        loss = torch.nn.functional.cross_entropy(net(x) * (1 + random.random()), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    def score() -> float:
        fault("validation")
        value = torch.tensor([float(session.position + rank)])
        dist.all_reduce(value)
        return float(value.item())

    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            x = x + torch.rand(1) * HAS_BODIES
            if HAS_BODIES and session.position % 2 == 0:
                session.run(score)
            with session.step():
                train(x, y)
            fault("between")
            if HAS_BODIES:
                if session.position % 3 == 0:
                    session.run(score)
                with session.step():
                    train(x.flip(0), y)

        scores.append(session.run(score))
    bits = hashlib.sha256()
    local = [getattr(each, "_local_tensor", each) for each in (*net.parameters(), *net.buffers())]
    own = getattr(optimizer, "optim", optimizer)
    for state in own.state_dict()["state"].values():
        local += [getattr(each, "_local_tensor", each) for each in state.values()]
    for each in local:
        bits.update(each.detach().contiguous().numpy().tobytes())
    end = {
        "steps": session.position,
        "bits": bits.hexdigest(),
        "random": [torch.rand(1).item(), random.random()],
        "rate": scheduler.get_last_lr() + [group["lr"] for group in optimizer.param_groups],
        "score": scores[-1],
        "pid": os.getpid() == pid and id(optimizer) == first,
        "redone": [each.redone for each in session.history],
    }
(FOLDER / f"end {rank}").write_text(json.dumps(end))
dist.destroy_process_group()
