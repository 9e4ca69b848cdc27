"""A module's group ends after its C++ parts, so that nobody who waits for Gloo's threads keeps the GIL."""

import json
import subprocess
import sys


CASE = """
import gc; gc.disable()
import json, os, weakref
from pathlib import Path
import torch, torch.distributed as dist
import torch.distributed.nn  # once imported in a group, it keeps the group
from torch.nn.parallel import DistributedDataParallel
from rallypoint._core import ddp_groups
from rallypoint.launch import torch_private
from rallypoint.rpc import autograd

def threads():
    return sum((each / "comm").read_text() == "pt_gloo_runloop\\n" for each in Path("/proc/self/task").iterdir())

def train(prepare):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    prepare(model)
    model(torch.ones(1, 2)).sum().backward()
    # When Python's own object for the group goes, so has the group if nothing in C++ owns it.
    weakref.finalize(dist.group.WORLD, lambda: left.append(threads()))
    assert threads()
    dist.destroy_process_group()

def nothing(model):
    pass

left = []
for prepare in nothing, ddp_groups.hold, autograd.average:
    train(prepare)
    gc.collect()
torch_private.hold_groups()  # as in workers
train(nothing)
gc.collect()
print(json.dumps(left), flush=True)
os._exit(0)
"""


def test_a_group_ends_after_the_reducers_that_use_it() -> None:
    done = subprocess.run([sys.executable, "-c", CASE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    torchs_own, *ours = json.loads(done.stdout)
    assert ours == [0, 0, 0]
    assert torchs_own, "torch has mended it: rallypoint._core.ddp_groups is no longer needed"
