"""Whatever a script's set-up exchanges, a process that takes over a lost rank gets what that rank got."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from supervisors import run


pytestmark = pytest.mark.integration

RANKS = 3
SCRIPT = """
import json, os, pathlib, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rallypoint import elastic, parallel

folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
dist.new_group([0, 2])
dist.barrier()
dist.destroy_process_group()
# torch gives its names once more.
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
pair, everybody = dist.new_group([0, 1]), dist.new_group(list(range(size)))
EXCHANGES = {}

def own(count=2):
    return torch.arange(1.0, 1 + count) * (rank + 1)

def several():
    return [torch.zeros(2) for _ in range(size)]

def exchange(function):
    EXCHANGES[function.__name__] = function

def told(given):
    if isinstance(given, torch.Tensor):
        return given.tolist()
    return [told(each) for each in given] if isinstance(given, (list, tuple)) else given

@exchange
def barrier():
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    if rank < 2:
        dist.barrier(pair)

@exchange
def all_reduce():
    x, y, z, some = own(), own(), own(), [own(), own(3)]
    dist.all_reduce(x)
    dist.all_reduce(y, op=dist.ReduceOp.MAX, async_op=True).wait()
    future = dist.all_reduce(z, async_op=True).get_future()
    future.wait()
    dist.all_reduce_coalesced(some)
    return x, y, z, future.value()[0], some

@exchange
def broadcast():
    x, objects = own(), [{"rank": rank}, "x"]
    dist.broadcast(x, 1)
    dist.broadcast_object_list(objects, 0)
    return x, objects

@exchange
def reduce():
    x = own()
    dist.reduce(x, 0)
    return x if rank == 0 else None

@exchange
def gather():
    lists, whole, objects = several(), torch.zeros(2 * size), [None] * size
    dist.all_gather(lists, own())
    dist.all_gather_into_tensor(whole, own())
    dist.all_gather_object(objects, {"rank": rank})
    to_one = several() if rank == 0 else None
    dist.gather(own(), to_one, 0)
    of_one = [None] * size if rank == 0 else None
    dist.gather_object({"rank": rank}, of_one, 0)
    return lists, whole, objects, to_one, of_one

@exchange
def scatter():
    x, objects = torch.zeros(2), [None]
    dist.scatter(x, [torch.full((2,), float(each)) for each in range(size)] if rank == 0 else None, 0)
    dist.scatter_object_list(objects, [f"for {each}" for each in range(size)] if rank == 0 else None, 0)
    return x, objects

@exchange
def reduce_scatter():
    x, y = torch.zeros(2), torch.zeros(2)
    dist.reduce_scatter(x, [own() + each for each in range(size)])
    dist.reduce_scatter_tensor(y, own(2 * size))
    return x, y

@exchange
def all_to_all():
    x, lists = torch.zeros(size), several()
    dist.all_to_all_single(x, own(size))
    dist.all_to_all(lists, [own() + each for each in range(size)])
    return x, lists

@exchange
def messages():
    x, y, z, objects = torch.zeros(2), torch.zeros(2), torch.zeros(2), [None]
    source = None
    if rank == 0:
        dist.send(own(), 1)
        dist.isend(own() + 1, 1).wait()
        dist.send(own() + 2, 1)
        dist.send_object_list([{"from": 0}], 1)
    elif rank == 1:
        dist.recv(x, 0)
        dist.irecv(y, 0).wait()
        source = dist.recv(z)
        dist.recv_object_list(objects, 0)
    around = torch.zeros(2)
    to, source_of_ring = (rank + 1) % size, (rank - 1) % size
    ring = [dist.P2POp(dist.isend, own(), to), dist.P2POp(dist.irecv, around, source_of_ring)]
    for each in dist.batch_isend_irecv(ring):
        each.wait()
    return x, y, z, objects, source, around

@exchange
def other_ways():
    return functional.all_reduce(own(), "sum", everybody) + 0, parallel.all_reduce(own()) + 0

got = {name: told(function()) for name, function in EXCHANGES.items()}
(folder / f"got {rank} {os.getpid()}").write_text(json.dumps(got))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with elastic.session(net, optimizer) as session:
    while session.position < 8:
        with session.step():
            fault = folder / f"fault {session.position}"
            if session.position in (2, 4, 6) and rank == session.position // 2 - 1 and not fault.exists():
                fault.touch()
                os.kill(os.getpid(), 9)
            dist.monitored_barrier()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("spares", [0, 1])
def test_a_process_that_takes_a_rank_over_gets_what_it_got(tmp_path: Path, spares: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ["--nproc-per-node", str(RANKS), "--spares", str(spares)]
    done = run(
        [*(sys.executable, "-m", "rallypoint", "run"), *flags, "train.py", str(tmp_path)],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "RALLY_LOG"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    got: dict[str, list[dict[str, Any]]] = {}
    for path in tmp_path.glob("got *"):
        got.setdefault(path.name.split()[1], []).append(json.loads(path.read_text()))
    assert len(got) == RANKS
    for rank, all_of_it in got.items():
        assert len(all_of_it) >= 2, f"rank {rank} was not taken over"
        for name, first in all_of_it[0].items():
            assert all(each[name] == first for each in all_of_it), f"rank {rank}: {name}"


DESTROYED = """
import os
import torch
import torch.distributed as dist
from rallypoint import elastic

dist.init_process_group("gloo")
held = []
for _ in range(4):
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    held.append([len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))])
    dist.destroy_process_group(group)
    del group
assert held == held[:1] * 4, held
dist.destroy_process_group()
"""


def test_a_group_that_is_destroyed_in_the_set_up_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DESTROYED)
    done = run(
        [*(sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2"), "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
