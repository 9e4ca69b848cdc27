"""The node that serves the job's store is lost again and again: each time, the workers of the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from elastic import listens, wait_until
from ports import free_port
from rallypoint.control.client import connect
from rallypoint.errors import ControlError
from supervisors import Popen


pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NODES, LOSSES = 4, 3
SCRIPT = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
if os.environ.get("RALLY_TAKES_OVER") and not os.environ.get("RALLY_SPARE"):
    (folder / f"set-up of {os.environ['RANK']}").write_text(str(os.getpid()))
    while (folder / "hold").exists():
        time.sleep(0.05)
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

def over():
    stop = torch.tensor([float((FOLDER / "stop").exists())])
    dist.all_reduce(stop)
    return stop.item() > 0

with elastic.session(net, optimizer, copies=int(sys.argv[2])) as session:
    rank, done = dist.get_rank(), False
    while not done:
        if session.position % 6 == 5:
            done = session.run(over)
            continue
        with session.step():
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (FOLDER / f"new {rank}").write_text(f"{session.position} {os.getpid()}")
        os.replace(FOLDER / f"new {rank}", FOLDER / f"at {rank}")
        time.sleep(0.05)
dist.destroy_process_group()
"""


SLOW = """
import pathlib, time
while pathlib.Path("slow").exists():
    time.sleep(0.05)
"""


class Node:
    """One `rally run`, and what it says. With ``slow``, its fork server imports for as long as a file of that name exists."""

    def __init__(
        self, folder: Path, port: int, copies: int, spares: int = 1, *, slow: bool = False
    ) -> None:
        flags = ["--nnodes", f"{NODES}:{NODES}", "--nproc-per-node", "1", "--spares", str(spares)]
        flags += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "lost", "--insecure"]
        flags += ["--rdzv-conf", "join_timeout=300", "--max-losses", "100"]
        flags += ["--preload", "imports_slowly"] * slow
        script = [str(folder / "train.py"), str(folder), str(copies)]
        self.process = Popen(
            [sys.executable, "-m", "rallypoint", "run", *flags, *script],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.lines += map(str, self.process.stderr)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join(60)
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def counts(self, text: str) -> int:
        return sum(text in line for line in list(self.lines))


class Job:
    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(SCRIPT)
        (folder / "imports_slowly.py").write_text(SLOW)
        self.folder, self.port = folder, free_port()
        self.copies = 2
        self.nodes: list[Node] = []

    def start(self, spares: int = 1, *, slow: bool = False) -> Node:
        self.nodes.append(Node(self.folder, self.port, self.copies, spares, slow=slow))
        return self.nodes[-1]

    def begin(self, spares: int = 1) -> Node:
        """Start the first node and wait until it has arrived. It serves the job's store and, as rank 0, the workers' store."""
        first = self.start(spares)

        def has_arrived() -> bool:
            try:
                state: str = connect(str(first.process.pid)).status()["state"]
            except ControlError:
                return False  # it is starting
            return state == f"waiting for nodes, 1 of {NODES}"

        wait_until(has_arrived, "the first node arrives")
        return first

    def all_train(self) -> dict[int, Node]:
        """Start all nodes, without spares. Returns the nodes by rank, once all train; the first one has the stores and rank 0."""
        self.begin(spares=0)
        for _ in range(NODES - 1):
            self.start(spares=0)
        self.trains(beyond=5)
        return {self.worker(node)["rank"]: node for node in self.living}

    def replace(self, node: Node, *, slow: bool = False) -> None:
        """Kill it, and start another one."""
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        self.start(spares=0, slow=slow)

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.is_alive]

    def server(self) -> Node:
        serving = [node for node in self.living if node.counts("serving it here")]
        return serving[-1] if serving else self.nodes[0]

    def progress(self) -> dict[int, tuple[int, int]]:
        """By rank: its step and its pid."""
        found = {}
        for rank in range(NODES):
            path = self.folder / f"at {rank}"
            text = path.read_text() if path.exists() else ""
            if text:
                step, pid = map(int, text.split())
                found[rank] = step, pid
        return found

    def trains(self, beyond: int = 0) -> dict[int, tuple[int, int]]:
        def look() -> dict[int, tuple[int, int]] | None:
            found = self.progress()
            all_are = len(found) == NODES and all(step > beyond for step, _ in found.values())
            return found if all_are else None

        try:
            return wait_until(look, f"all ranks are beyond step {beyond}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self}") from None

    def begins_anew(self, before: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Wait until all ranks are new processes. Returns their progress."""

        def look() -> dict[int, tuple[int, int]] | None:
            found = self.progress()
            return found if all(found[rank][1] != before[rank][1] for rank in before) else None

        try:
            return wait_until(look, "all begin anew", 100)
        except AssertionError as error:
            raise AssertionError(f"{error}; {before} then, {self.progress()} now\n{self}") from None

    def worker(self, node: Node) -> dict[str, Any]:
        found: dict[str, Any] = connect(str(node.process.pid)).status()["workers"][0]
        return found

    def spares(self, node: Node) -> list[int]:
        """The pids of the waiting spares."""
        told = connect(str(node.process.pid)).status()["spares"]
        return [each["pid"] for each in told if each["state"] == "waiting"]

    def spares_wait(self) -> None:
        def look() -> bool:
            return all(len(self.spares(node)) == 1 for node in self.living)

        try:
            wait_until(look, "a spare waits on each node", 100)
        except AssertionError as error:
            states = [connect(str(node.process.pid)).status()["spares"] for node in self.living]
            raise AssertionError(f"{error}: {states}\n{self}") from None

    def trains_again(self) -> dict[int, tuple[int, int]]:
        """After a loss, wait until all are beyond what any had reached when it struck. Returns their progress."""
        # Read after the loss: the survivors have been going on until then.
        reached = max(step for step, _ in self.progress().values())
        return self.trains(beyond=reached + 5)

    def __str__(self) -> str:
        return "\n".join(
            f"-- {n.process.pid} ({n.process.returncode})\n{''.join(n.lines)}" for n in self.nodes
        )


@pytest.fixture(name="job")
def _job(tmp_path: Path) -> Iterator[Any]:
    job = Job(tmp_path)
    yield job
    for node in job.nodes:
        node.close()


@pytest.mark.parametrize("comes", ["at once", "later"])
def test_the_stores_node_is_lost_again_and_again(job: Job, comes: str) -> None:
    job.start()
    wait_until(lambda: listens(job.port), "a store")
    for _ in range(NODES - 1):
        job.start()
    job.trains(beyond=5)
    for loss in range(1, LOSSES + 1):
        if loss == 2:
            job.spares_wait()
        before, victim = job.progress(), job.server()
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()
        if comes == "later":
            wait_until(lambda lost=victim: job.server() is not lost, "another node serves", 30)
        job.start()
        began = time.monotonic()
        after = job.trains_again()
        print(f"loss {loss}: all train again after {time.monotonic() - began:.1f} s")
        changed = [rank for rank in range(NODES) if before[rank][1] != after[rank][1]]
        assert len(changed) == 1, f"ranks {changed} are new processes\n{job}"
    (job.folder / "stop").touch()
    wait_until(lambda: not job.living, "the job ends", 60)
    assert sorted(node.process.returncode for node in job.nodes) == [-9] * LOSSES + [0] * NODES, (
        str(job)
    )


def test_a_spare_takes_the_place_of_a_worker_that_is_lost_while_the_nodes_meet(job: Job) -> None:
    job.start()
    wait_until(lambda: listens(job.port), "a store")
    for _ in range(NODES - 1):
        job.start()
    job.trains(beyond=5)
    job.spares_wait()
    before, victim = job.progress(), job.server()
    ranks = {job.worker(node)["rank"]: node for node in job.living}
    lost = next(rank for rank, node in ranks.items() if node is victim)
    # The next node has the record of the lost one's set-up.
    other = ranks[(lost + 2) % NODES]
    (spare,) = job.spares(other)
    worker = job.worker(other)
    victim.process.send_signal(signal.SIGKILL)
    victim.process.wait()
    # Nobody replaces the node yet, so the others meet and wait.
    wait_until(lambda: job.server() is not victim, "another node serves", 30)
    os.kill(worker["pid"], signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{worker['pid']}").exists(), "the worker ends", 30)
    job.start()
    after = job.trains_again()
    assert after[worker["rank"]][1] == spare, str(job)
    kept = [rank for rank in range(NODES) if before[rank][1] == after[rank][1]]
    assert len(kept) == NODES - 2, str(job)
    (job.folder / "stop").touch()
    wait_until(lambda: not job.living, "the job ends", 60)


@pytest.mark.parametrize(
    ("behind", "copies", "num_kept"),
    [(2, 2, NODES - 2), (1, 2, 0), (1, 3, NODES - 2)],
    ids=["apart", "next", "next, with more copies"],
)
def test_the_store_is_lost_while_a_worker_is_on_its_way_to_the_session(
    job: Job, behind: int, copies: int, num_kept: int
) -> None:
    """Its set-up needs the store, so another one takes its place. If it alone had the lost node's record, all start again."""
    job.copies = copies
    job.begin(spares=0)
    for _ in range(NODES - 1):
        job.start(spares=0)
    job.trains(beyond=5)
    before, victim = job.progress(), job.server()
    ranks = {job.worker(node)["rank"]: node for node in job.living}
    lost = next(rank for rank, node in ranks.items() if node is victim)
    rank = (lost + behind) % NODES
    (job.folder / "hold").touch()
    os.kill(before[rank][1], signal.SIGKILL)
    try:
        wait_until(lambda: (job.folder / f"set-up of {rank}").exists(), "another one sets up")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job}") from None
    victim.process.send_signal(signal.SIGKILL)
    victim.process.wait()
    wait_until(lambda: job.server() is not victim, "another node serves", 60)
    (job.folder / "hold").unlink()
    job.start(spares=0)
    after = job.trains_again() if num_kept else job.begins_anew(before)
    kept = [each for each in range(NODES) if before[each][1] == after[each][1]]
    assert len(kept) == num_kept, str(job)
    (job.folder / "stop").touch()
    wait_until(lambda: not job.living, "the job ends", 60)


def test_newcomers_go_on_with_their_set_up_while_the_nodes_meet_again(job: Job) -> None:
    """The workers' store is still where they look for the set-up's records."""
    ranks = job.all_train()
    before = job.progress()
    (job.folder / "hold").touch()
    for rank in (2, 3):
        job.replace(ranks[rank])
        begun = job.folder / f"set-up of {rank}"
        wait_until(
            lambda path=begun: path.exists() and path.read_text(),
            f"rank {rank} is on its way to the session",
            60,
        )
    pids = [int((job.folder / f"set-up of {rank}").read_text()) for rank in (2, 3)]
    (job.folder / "hold").unlink()
    after = job.trains_again()
    assert [after[rank][1] for rank in range(NODES)] == [before[0][1], before[1][1], *pids], str(
        job
    )
    (job.folder / "stop").touch()
    wait_until(lambda: not job.living, "the job ends", 60)


def test_a_node_is_lost_while_the_workers_of_another_one_are_yet_to_be_started(job: Job) -> None:
    ranks = job.all_train()
    before = job.progress()
    (job.folder / "slow").touch()
    stays = ranks[0]
    for rank in (2, 3):
        job.replace(ranks[rank], slow=rank == 2)
        told = f"takes its place (rank {rank})"
        wait_until(
            lambda text=told: stays.counts(text), f"the others meet the node of rank {rank}", 60
        )
    (job.folder / "slow").unlink()
    after = job.trains_again()
    kept = [each for each in range(NODES) if before[each][1] == after[each][1]]
    assert kept == [0, 1], str(job)
    (job.folder / "stop").touch()
    wait_until(lambda: not job.living, "the job ends", 60)


@pytest.mark.parametrize("copies", [2, 3])
def test_workers_that_are_yet_to_be_started_belong_to_the_round_that_forms_next(
    job: Job, copies: int
) -> None:
    """The node with the workers' store is lost. Another one is lost just as its successor could start workers."""
    job.copies = copies
    # The job's store is not on any node: one that is still importing could not serve it.
    store = TCPStore("127.0.0.1", job.port, is_master=True, wait_for_workers=False)
    for _ in range(NODES):
        job.start(spares=0)
    job.trains(beyond=5)
    before = job.progress()
    ranks = {job.worker(node)["rank"]: node for node in job.living}
    (job.folder / "slow").touch()
    ranks[0].process.send_signal(signal.SIGKILL)
    ranks[0].process.wait()
    slow = job.start(spares=0, slow=True)
    wait_until(lambda: ranks[1].counts("takes its place (rank 0)"), "a node comes", 60)
    ranks[3].process.send_signal(signal.SIGKILL)
    ranks[3].process.wait()

    def status() -> dict[str, Any]:
        told: dict[str, Any] = connect(str(slow.process.pid)).status()
        return told

    wait_until(lambda: "the nodes meet again" in status()["state"], "they meet again", 30)
    (job.folder / "slow").unlink()
    wait_until(lambda: status()["is_ready"], "workers can be started", 60)
    job.start(spares=0)
    # Two copies of rank 3's records were on the two lost nodes.
    after = job.trains_again() if copies == 3 else job.begins_anew(before)
    kept = [each for each in range(NODES) if before[each][1] == after[each][1]]
    assert kept == ([1, 2] if copies == 3 else []), str(job)
    (job.folder / "stop").touch()
    wait_until(lambda: not job.living, "the job ends", 60)
    del store


def test_all_begin_anew_without_a_charge_if_a_record_is_lost_with_its_nodes(job: Job) -> None:
    job.copies = 3
    ranks = job.all_train()
    before = job.progress()
    ranks[0].process.send_signal(signal.SIGKILL)
    ranks[0].process.wait()
    # All three that had the record of rank 2 are gone before they can pass it on.
    for rank in (2, 3):
        os.kill(before[rank][1], signal.SIGKILL)
    job.start(spares=0)
    job.begins_anew(before)
    text = str(job)
    # Whether the round, a node that meets the others again, or a newcomer notices it depends on the moment.
    told = [line for line in text.splitlines() if "restarting all workers" in line]
    assert any("set-up" in line for line in told), text
    assert "the job failed" not in text, text
    (job.folder / "stop").touch()
    wait_until(lambda: not job.living, "the job ends", 60)
