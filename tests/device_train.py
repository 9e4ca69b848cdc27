"""A training in an elastic session for test_elastic_devices.py; workers die at given places: device_train.py FOLDER FAULTS KIND.

KIND starts with the device and the backend, as in "cuda nccl fsdp2". Ranks may share a GPU: NCCL takes two ranks on one GPU
for a mistake, unless they seem to be on different hosts.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fake_nccl
from faulty import FOLDER, die_at
from rallypoint import elastic


DEVICE, BACKEND, *KIND = sys.argv[3].split()


def fault(where: str) -> None:
    die_at(session.position, dist.get_rank(), where)


class Dying(torch.autograd.Function):
    """Does nothing, except for the fault in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        fault("backward")
        return grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.middle = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2)
        return self.last(Dying.apply(self.middle(x)).relu())


# For NCCL.
os.environ["NCCL_HOSTID"] = f"host of rank {os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
device = torch.device(DEVICE, 0)
if DEVICE == "cuda":
    torch.cuda.set_device(device)
elif BACKEND == "nccl":
    fake_nccl.install()
dist.init_process_group("gloo" if DEVICE == "cpu" else BACKEND)
rank, size = dist.get_rank(), dist.get_world_size()
told: list[Any] = [f"of rank {rank}"]
dist.broadcast_object_list(told)
assert told == ["of rank 0"], told
everybody: list[Any] = [None] * size
dist.all_gather_object(everybody, rank)
assert everybody == list(range(size)), everybody
pair = dist.new_group([0, 1])
if rank < 2 and BACKEND == "nccl":
    told_by = torch.full((3,), float(rank), device=device)
    if rank == 0:
        dist.send(told_by, 1)
    else:
        dist.recv(told_by, 0)
        assert told_by.tolist() == [0.0] * 3, told_by

net: Any = Net().to(device)
if "fsdp2" in KIND:
    from torch.distributed.fsdp import fully_shard

    for part in (net.first, net.middle):
        fully_shard(part)
    fully_shard(net)
else:
    if "sync" in KIND:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net = DistributedDataParallel(
        net,
        bucket_cap_mb=0.001,
        static_graph="static" in KIND,
        device_ids=[0] if DEVICE == "cuda" else None,
    )
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, fused="fused" in KIND)
scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled="scaler" in KIND)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
data = torch.utils.data.TensorDataset(torch.randn(160, 16), torch.randint(4, (160,)))
loader: Any = torch.utils.data.DataLoader(
    data, batch_size=10, shuffle=True, pin_memory=DEVICE == "cuda"
)
torch.manual_seed(100 + rank)
random.seed(rank)
losses, pid = [], os.getpid()
given = [net, optimizer, scheduler, *([scaler] if scaler.is_enabled() else [])]


def validate() -> float:
    net.eval()
    with torch.no_grad():
        total = net(data.tensors[0][:20].to(device)).sum()
    net.train()
    dist.all_reduce(total)
    fault("validation")
    return total.item()


scores = []
with elastic.session(*given, snapshot_every=4) as session:
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            with session.step():
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                fault("forward")
                with torch.autocast(DEVICE, torch.float16, enabled=scaler.is_enabled()):
                    loss = nn.functional.cross_entropy(net(x), y)
                scaler.scale(loss).backward()
                fault("optimizer")
                mean = loss.detach().clone()
                dist.all_reduce(mean, group=pair) if size == 2 else None
                scaler.step(optimizer)
                scaler.update()
                fault("after")
                optimizer.zero_grad()
                scheduler.step()
            fault("between")
        scores.append(session.run(validate))


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


digest = hashlib.sha256()
for tensor in (*net.parameters(), *net.buffers()):
    digest.update(local(tensor.detach()).cpu().numpy().tobytes())
for held in optimizer.state.values():
    for key in sorted(held):
        digest.update(local(held[key]).cpu().numpy().tobytes())
generators = [torch.get_rng_state()]
if DEVICE == "cuda":
    generators.append(torch.cuda.get_rng_state())
end = {
    "steps": session.position,
    "bits": digest.hexdigest(),
    "random": hashlib.sha256(b"".join(each.numpy().tobytes() for each in generators)).hexdigest(),
    "rate": scheduler.get_last_lr(),
    "scale": scaler.get_scale() if scaler.is_enabled() else 1.0,
    "score": scores[-1],
    "same process": pid == os.getpid(),
    "recoveries": [[each.formed, each.transferred, each.redone] for each in session.history],
    "threads": sorted(each.name for each in threading.enumerate() if "disposal" in each.name),
}
(FOLDER / f"end {rank}").write_text(json.dumps(end))
dist.destroy_process_group()
