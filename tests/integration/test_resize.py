"""Nodes are lost and arrive: a session goes on in the same processes with fewer ranks, and with more."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from resized_job import PAUSE, Job


pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SAMPLES, BATCH, EPOCHS = 336, 12, 2
# Newcomers meet the others while those train: this is far enough for that, and before the end.
FAR, BEYOND = 50, 1 << 20
SCRIPT = """
import json, os, pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from rallypoint import elastic

folder, samples, batch_size, epochs = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5])
PAUSE = 3 * float(os.environ["PAUSE"])  # FAR is only a few steps away
torch.manual_seed(0)
torch.set_num_threads(1)
if (folder / "fails").exists():
    raise ValueError("no data on this node")
dist.init_process_group("gloo")
(folder / f"set-up {os.getpid()}").touch()
while (folder / "wait in set-up").exists():
    time.sleep(0.01)
net = DistributedDataParallel(torch.nn.Linear(4, 1).double())
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
sampler = elastic.Sampler(samples, batch_size=batch_size, seed=3)
loader = DataLoader(range(samples), batch_sampler=sampler)
kept = {"checkpoint": folder / "checkpoints", "checkpoint_every": 4} if "--checkpoints" in sys.argv else {}
session = elastic.session(net, optimizer, **kept)
sizes = []
session.on_resize(lambda before, now: sizes.append([before, now]), in_place="--fixed" not in sys.argv)
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
                dist.all_reduce(whole)
                loss = ((net(x) - y) ** 2).sum() * dist.get_world_size() / whole.item()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if session.position > position:
                told = {"step": position, "rank": dist.get_rank(), "size": dist.get_world_size(),
                        "env": [os.environ["RANK"], os.environ["WORLD_SIZE"]],
                        "samples": indices.tolist(), "sizes": sizes}
                print(json.dumps(told), file=log)
            (folder / f"new {os.getpid()}").write_text(f"{session.position}")
            os.replace(folder / f"new {os.getpid()}", folder / f"at {os.getpid()}")
            while session.position >= (end := int((folder / "wait").read_text())):
                time.sleep(0.02)
            time.sleep(PAUSE if end < 1 << 30 else 0.0)
if dist.get_rank() == 0:
    torch.save([each.detach() for each in net.module.parameters()], folder / "end.pt")
dist.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(least: int, most: int, **more: Any) -> Job:
        made.append(Job(tmp_path, least, most, SCRIPT, (SAMPLES, BATCH, EPOCHS), **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def one_process() -> list[torch.Tensor]:
    """The parameters after the same training in one process."""
    from rallypoint import elastic

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1).double()
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


def check(job: Job, tmp_path: Path) -> list[dict[str, Any]]:
    """Every sample was trained on once in each epoch, and the result is that of one process."""
    told = job.told()
    per_epoch = len(range(0, SAMPLES, BATCH))
    for epoch in range(EPOCHS):
        seen: list[int] = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            by_size: dict[int, list[list[int]]] = {}
            for each in told:
                if each["step"] == step:
                    by_size.setdefault(each["size"], []).append(each["samples"])
            # A process that arrives after a step, in the same body, runs that step without effect.
            of_step = max(by_size.items(), key=lambda each: (each[0] == len(each[1]), len(each[1])))
            seen += (sample for samples in of_step[1] for sample in samples)
        assert len(seen) == len(set(seen)), "a sample came twice"
        # A lost rank reports nothing of its last step if the others have completed it.
        assert len(seen) >= SAMPLES - BATCH
    check_end(tmp_path)
    return told


def check_end(tmp_path: Path) -> None:
    for mine, theirs in zip(torch.load(tmp_path / "end.pt"), one_process(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "lost", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
)
def test_a_session_goes_on_without_a_lost_node_and_with_one_that_joins(
    job: Callable[..., Job], tmp_path: Path, lost: int
) -> None:
    """The first node serves the job's store; one of the nodes, with rank 0, serves the workers' store."""
    it = job(2, 3)
    it.hold_at(8)
    for _ in range(3):
        it.start()
    it.wait(lambda: list(it.steps().values()).count(8) == 6, "six ranks train")
    before = set(it.steps())
    it.kill(it.nodes[lost])
    it.hold_at(16)
    it.wait(lambda: list(it.steps().values()).count(16) == 4, "four ranks go on")
    survivors = set(it.steps())
    assert survivors < before, it.output()
    assert {each["size"] for each in it.told() if each["step"] == 15} == {4}
    it.start()
    it.hold_at(FAR)
    it.wait(lambda: len(it.steps()) == 6, "six ranks again")
    assert survivors < set(it.steps()), it.output()
    it.go_on()
    for node in it.nodes:
        node.wait(120)
    assert "random state" not in it.output(), "nobody had one at the new ranks"
    told = check(it, tmp_path)
    last = [each for each in told if each["step"] == told[-1]["step"]]
    assert [each["rank"] for each in last] == list(range(6))
    assert all(each["env"] == [str(each["rank"]), "6"] for each in last)
    assert {str(each["sizes"]) for each in last if each["pid"] in survivors} == {"[[6, 4], [4, 6]]"}
    assert {str(each["sizes"]) for each in last if each["pid"] not in survivors} == {"[[4, 6]]"}


@pytest.mark.long
def test_one_node_gets_another_one_and_is_lost_itself(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """It serves the job's store and the workers' store, and has the records of the set-up."""
    it = job(1, 2)
    it.hold_at(10)
    it.start()
    it.wait(lambda: len(it.at(10)) == 2, "two ranks train")
    first = set(it.steps())
    it.start()
    it.hold_at(FAR)
    it.wait(lambda: len(it.steps()) == 4, "four ranks train")
    came = set(it.steps()) - first
    it.kill(it.nodes[0])
    reached = max(it.steps().values())
    it.wait(lambda: set(it.at(reached + 5)) == came, "those that came go on")
    it.start()
    it.wait(lambda: len(it.steps()) == 4, "four ranks again")
    assert came < set(it.steps())
    it.go_on()
    for node in it.nodes:
        node.wait(120)
    check(it, tmp_path)


@pytest.mark.long
def test_checkpoints_are_those_of_the_ranks_that_are_there(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    it = job(1, 2)
    it.words.append("--checkpoints")
    it.hold_at(6)
    it.start()
    it.start()
    it.wait(lambda: len(it.at(6)) == 4, "four ranks train")
    it.kill(next(node for node in it.nodes if rank_0_is_on(node, it)))
    it.hold_at(14)
    it.wait(lambda: len(it.at(14)) == 2, "two ranks go on")

    def ranks_of(step: int) -> int | None:
        record = tmp_path / "checkpoints" / f"step-{step:08d}" / "checkpoint.json"
        return json.loads(record.read_text())["ranks"] if record.exists() else None

    it.wait(lambda: ranks_of(12), "the checkpoint of step 12")
    assert ranks_of(12) == 2
    it.start()
    it.hold_at(FAR)
    it.wait(lambda: len(it.steps()) == 4, "four ranks again")
    reached = max(it.steps().values()) // 4 * 4 + 8
    it.wait(lambda: ranks_of(reached), "another checkpoint")
    assert ranks_of(reached) == 4
    it.go_on()
    for node in it.nodes:
        node.wait(120)
    check(it, tmp_path)


def rank_0_is_on(node: subprocess.Popen[bytes], it: Job) -> bool:
    pid = next(each["pid"] for each in it.told() if each["rank"] == 0)
    return pid in {each.pid for each in psutil.Process(node.pid).children(recursive=True)}


@pytest.mark.long
def test_a_preempted_node_leaves_and_the_others_go_on(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    it = job(1, 3)
    it.hold_at(10)
    for _ in range(3):
        it.start()
    it.wait(lambda: len(it.at(10)) == 6, "six ranks train")
    before = set(it.steps())
    it.nodes[2].send_signal(signal.SIGTERM)
    it.hold_at(30)
    it.wait(lambda: len(it.at(30)) == 4, "four ranks go on")
    assert set(it.at(30)) < before
    it.go_on()
    for node in it.nodes:
        node.wait(120)
    check(it, tmp_path)


def test_a_node_whose_workers_fail_leaves_and_others_may_come(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    it = job(1, 3, conf="lease=10,last_call_timeout=1")  # the first one begins alone
    it.hold_at(8)
    it.start()
    it.wait(lambda: len(it.at(8)) == 2, "two ranks train")
    before = set(it.steps())
    (tmp_path / "fails").touch()
    assert it.start().wait(60) == 1
    failed = "this node left the job: rank"
    assert failed in (tmp_path / "node 1").read_text(), it.output()
    told = re.search(
        r"node 1 failed: rank [23] raised ValueError: no data on this node;",
        (tmp_path / "node 0").read_text(),
    )
    assert told, it.output()
    (tmp_path / "fails").unlink()
    it.hold_at(16)
    it.wait(lambda: len(it.at(16)) == 2, "two ranks go on")
    it.start()
    it.hold_at(FAR)
    it.wait(lambda: len(it.steps()) == 4, "four ranks train")
    assert before < set(it.steps()), it.output()
    it.go_on()
    assert [node.wait(120) for node in it.nodes] == [0, 1, 0], it.output()
    check(it, tmp_path)


def test_a_node_that_comes_during_the_set_up_is_admitted_behind_it(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """The existing workers need not start again for it."""
    it = job(1, 2, conf="lease=3,last_call_timeout=1")
    (tmp_path / "wait in set-up").touch()
    it.hold_at(5)
    it.start()
    it.wait(lambda: len(list(tmp_path.glob("set-up *"))) == 2, "two ranks set up")
    it.start()
    said = "a node waits to join: it is admitted once all workers are in the session"
    it.wait(lambda: said in it.output(), "the node waits")
    (tmp_path / "wait in set-up").unlink()
    it.wait(lambda: len(it.at(5)) == 2, "two ranks train")
    first = set(it.steps())
    assert first == {int(path.name.split()[1]) for path in tmp_path.glob("set-up *")}
    it.hold_at(FAR)
    it.wait(lambda: len(it.steps()) == 4, "four ranks train")
    assert first < set(it.steps())
    it.go_on()
    for node in it.nodes:
        node.wait(120)
    assert it.output().count(said) == 1
    assert "restarting" not in it.output()
    check(it, tmp_path)


def test_a_script_that_counts_on_its_rank_starts_again(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    it = job(1, 2)
    it.words.append("--fixed")
    it.hold_at(4)
    for _ in range(2):
        it.start()
    it.wait(lambda: list(it.steps().values()).count(4) == 4, "four ranks train")
    before = set(it.steps())
    it.kill(it.nodes[1])
    it.wait(lambda: before.isdisjoint(it.steps()) and len(it.at(4)) == 2, "two other ranks train")
    it.go_on()
    it.nodes[0].wait(120)
    check_end(tmp_path)


def test_steps_under_way_are_repeated_with_their_samples_shared_anew(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Nodes are lost and arrive while steps run, at any moment."""
    it = job(1, 3)
    it.hold_at(BEYOND)
    draws = random.Random(0)
    for _ in range(3):
        it.start()
    for number in range(1, 6):
        it.wait(lambda step=9 * number: len(it.at(step)) >= 2, "some ranks train")
        time.sleep(draws.uniform(0, 4 * PAUSE))  # or all is done right behind a step
        living = [node for node in it.nodes if node.poll() is None]
        if number % 2:
            it.kill(living[number % len(living)])
        else:
            it.start()
            it.start()
    for node in it.nodes:
        node.wait(120)
    check_end(tmp_path)
    assert "ranks go on at step" in it.output()
