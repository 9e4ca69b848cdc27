"""A job loses a node and goes on with fewer, another node comes, and no sample of the epoch comes twice or is left out."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic import listens, wait_until
from ports import free_port
from supervisors import Popen


pytestmark = pytest.mark.integration

LENGTH, BATCH = 90, {"global": 6, "local": 2}
DATA = """
def data():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(90, 4, generator=generator), torch.randint(2, (90,), generator=generator)
"""
SCRIPT = (
    """
import contextlib, json, os, pathlib, signal, sys, time
from rallypoint import elastic
from rallypoint.errors import ElasticError
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

FOLDER, KEEP, BATCH = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
"""
    + DATA
    + """
def supervisor():
    pid = os.getpid()
    while b"rallypoint run" not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" "):
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid

def log(name, *what):
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(what) + "\\n")

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generation = int(os.environ["RALLY_GENERATION"])
torch.manual_seed(0)
net = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sampler = elastic.Sampler(90, BATCH, seed=3, keep=KEEP)
loader = DataLoader(TensorDataset(torch.arange(90), *data()), batch_sampler=sampler)
session = elastic.session(net, optimizer, checkpoint=FOLDER / "checkpoints", checkpoint_every=1)
session.on_resize(lambda before, now: log(f"resized {rank}", generation, before, now))
with session:
    try:
        session.on_resize(print)
    except ElasticError:
        pass
    else:
        raise AssertionError("too late")
    begun = session.position
    for epoch in session.epochs(1):
        for ids, x, y in session.batches(loader):
            if generation == 0 and session.position == 5 and rank == size - 1:
                os.kill(supervisor(), signal.SIGKILL)
                time.sleep(100)
            if size == 2 and session.position >= begun + 3:
                (FOLDER / "small").touch()
                time.sleep(100)  # until another node comes
            with session.step():
                count = torch.tensor(len(ids))
                dist.all_reduce(count)
                passes = list(zip(x.split(2), y.split(2)))  # one on three ranks
                for number, (part, wanted) in enumerate(passes, 1):
                    with contextlib.nullcontext() if number == len(passes) else net.no_sync():
                        loss = torch.nn.functional.cross_entropy(net(part), wanted, reduction="sum")
                        (loss * size / count).backward()
                optimizer.step()
                optimizer.zero_grad()
            log(f"ids {rank}", generation, size, session.position, ids.tolist())
            session._checkpoints._join(None)
torch.save(net.module.state_dict(), FOLDER / f"end {rank}")
dist.destroy_process_group()
"""
)


@pytest.mark.long
@pytest.mark.parametrize("keep", ["global", "local"])
def test_each_sample_comes_once_though_a_node_is_lost_and_another_one_comes(
    keep: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()

    def node() -> subprocess.Popen[str]:
        return Popen(
            [
                *(sys.executable, "-m", "rallypoint", "run", "--nnodes", "2:3", "--insecure"),
                *("--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"),
                *("--rdzv-id", "nodes", "--preload", "torch._dynamo", "--shutdown-timeout", "2"),
                *("--rdzv-conf", "last_call_timeout=5"),
                *(str(tmp_path / "train.py"), str(tmp_path), keep, str(BATCH[keep])),
            ],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )

    started = [node()]
    try:
        wait_until(lambda: listens(port), "a store")
        started += [node() for _ in range(2)]
        wait_until((tmp_path / "small").exists, "training with two nodes")
        started.append(node())
        said = [each.communicate(timeout=150)[1] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert sorted(each.returncode for each in started) == [-signal.SIGKILL, 0, 0, 0], said
    # All ranks are told, once for each change.
    for rank in range(2):
        lines = (tmp_path / f"resized {rank}").read_text().splitlines()
        assert [json.loads(line)[1:] for line in lines] == [[3, 2], [2, 3]], said
    steps = trained_on(tmp_path)
    assert sorted(each for step in steps for each in step) == list(range(LENGTH))
    # Three ranks take 6 samples per step. Two take 6 or 4.
    lengths = [len(each) for each in steps]
    if keep == "global":
        assert lengths == [6] * 15
    else:
        assert lengths[:3] == [6, 6, 6]
        assert lengths.count(4) >= 2
        assert max(lengths) == 6
    # As one process that trains on the same samples.
    parameters = alone(steps)
    for rank in range(3):
        for name, value in torch.load(tmp_path / f"end {rank}").items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-5, atol=1e-6)


def trained_on(folder: Path) -> list[list[int]]:
    """The samples of each step that counted: those that a later generation has trained again, behind its checkpoint, did not."""
    found: dict[int, dict[tuple[int, int], list[int]]] = {}
    for rank in range(3):
        for line in (folder / f"ids {rank}").read_text().splitlines():
            generation, _, step, ids = json.loads(line)
            found.setdefault(step, {})[generation, rank] = ids
    steps = []
    for _, parts in sorted(found.items()):
        last = max(generation for generation, _ in parts)
        steps.append([each for (when, _), ids in parts.items() if when == last for each in ids])
    return steps


def alone(steps: list[list[int]]) -> dict[str, torch.Tensor]:
    made: dict[str, object] = {"torch": torch}
    exec(DATA, made)
    x, y = made["data"]()  # type: ignore[operator]
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for ids in steps:
        nn.functional.cross_entropy(net(x[ids]), y[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()
