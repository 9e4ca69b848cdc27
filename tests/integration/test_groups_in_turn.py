"""A script that makes one default group after another."""

from pathlib import Path

import pytest

from supervisors import RALLY, run


pytestmark = pytest.mark.integration

TRAININGS = """
import gc, weakref
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(number):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.ones(1, 2) * (dist.get_rank() + 1 + number)).sum().backward()
    assert model.module.weight.grad.tolist() == [[number + 1.5] * 2]
    for ranks in ([0], [1], [0, 1]):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == len(ranks)
    dist.destroy_process_group()  # the model is still there, and goes with this function

for number in range(10):
    train(number)

def threads():
    return sum((each / "comm").read_text() == "pt_gloo_runloop\\n" for each in Path("/proc/self/task").iterdir())

def train_alone():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    weakref.finalize(dist.group.WORLD, lambda: print(threads(), "threads left"))
    assert threads()
    dist.destroy_process_group()

# When Python's own object for the group goes, so has the group: the model has gone before.
gc.collect()
train_alone()
gc.collect()
"""


def test_each_group_finds_its_own_members_and_ends_after_the_model(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAININGS)
    done = run(
        [RALLY, "run", "--nproc-per-node", 2, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 threads left"] * 2
