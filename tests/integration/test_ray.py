"""Jobs on Ray: real raylets on this host. `pip install ray` enables these; CI does without it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic import wait_until
from rallypoint._core import process


pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
]

# A driver with a cluster of raylets; the head has no room for bundles.
DRIVER = """
import os, pathlib, sys, threading, time
import ray
from ray.cluster_utils import Cluster
from rallypoint.errors import LaunchError, WorkersFailed
from rallypoint.ray import RallyTrainer

here = pathlib.Path.cwd()

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.1)

def total(start):
    import torch, torch.distributed as dist
    x = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(x)
    print("rank", dist.get_rank(), "was here", flush=True)
    return x.item(), dist.get_rank(), dist.get_world_size()

def stays(last):
    import os, subprocess, torch.distributed as dist
    generation = os.environ["RALLY_GENERATION"]
    (here / f"generation-{generation}-{dist.get_rank()}-{dist.get_world_size()}").touch()
    if generation == last:
        return "done by " + str(dist.get_world_size())
    subprocess.Popen(["sleep", "1000"])
    time.sleep(1000)

def saves():
    import os
    (here / ("began-" + os.environ["RANK"])).touch()
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        time.sleep(13)
        (here / ("saved-" + os.environ["RANK"])).touch()
        raise

def fails():
    import torch.distributed as dist
    if dist.get_rank() == 1:
        raise ValueError("no such luck")
    time.sleep(1000)

cluster = Cluster(initialize_head=True, head_node_args=eval(sys.argv[2]))
first, second = cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)
if len(sys.argv) == 3:
    ray.init(address=cluster.address)
try:
    exec(sys.argv[1])
finally:
    ray.shutdown()
    cluster.shutdown()
"""
RANKS = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
sys.exit(7 if sys.argv[1:] == [os.environ["RANK"]] else 0)
"""


class Driver:
    """Runs drivers, and looks for what they leave behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"site-{uuid.uuid4().hex}"
        self.begun: list[subprocess.Popen[str]] = []
        (folder / "driver.py").write_text(DRIVER)
        (folder / "ranks.py").write_text(RANKS)

    def start(
        self, program: str, *words: str, head: Mapping[str, Any] | None = None
    ) -> subprocess.Popen[str]:
        head = head or {"num_cpus": 0, "include_dashboard": False}
        # Ray runs a job's command with the cluster's own path.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        begun = subprocess.Popen(
            [sys.executable, "driver.py", program, repr(head), *words],
            cwd=self.folder,
            env={
                **os.environ,
                "PATH": path,
                "RALLY_SITE": self.mark,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_DEDUP_LOGS": "0",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.begun.append(begun)
        return begun

    def run(self, program: str, *words: str, head: Mapping[str, Any] | None = None) -> list[str]:
        begun = self.start(program, *words, head=head)
        out, _ = begun.communicate(timeout=240)
        assert begun.returncode == 0, out
        self.wait_nothing_left()
        return out.splitlines()

    def left(self) -> list[int]:
        mine = {os.getpid(), *(each.pid for each in self.begun)}
        return list(process.marked_processes(f"RALLY_SITE={self.mark}".encode(), mine))

    def wait_nothing_left(self) -> None:
        wait_until(lambda: not self.left(), f"nothing is left; there is {self.left()}", 60)

    def close(self) -> None:
        for pid in self.left():
            process_end(pid)
        for each in self.begun:
            process_end(each.pid)
            each.wait(60)
            if each.stdout is not None:
                each.stdout.close()


def process_end(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path)
    yield made
    made.close()


def test_a_function_and_a_script_on_two_raylets(driver: Driver) -> None:
    lines = driver.run(
        "trainer = RallyTrainer(total, args=[10.0], num_nodes=2, workers_per_node=2)\n"
        "print('result', trainer.fit(), flush=True)\n"
        "print('script', RallyTrainer(['ranks.py', 'x'], num_nodes=2).fit(), flush=True)\n"
        "try:\n    RallyTrainer(['ranks.py', '1'], num_nodes=2, flags=['--shutdown-timeout', '2']).fit()\n"
        "except WorkersFailed as error:\n    print('code', error.report.exit_code, flush=True)\n"
        "try:\n    RallyTrainer(fails, num_nodes=2, flags=['--shutdown-timeout=2']).fit()\n"
        "except WorkersFailed as error:\n"
        "    root = error.report.root_cause\n"
        "    print('root', root.rank, root.raised.message, 'in fails' in str(error), flush=True)\n"
        "try:\n    RallyTrainer(total, num_nodes=3, placement_timeout=2).fit()\n"
        "except LaunchError as error:\n    print('no room', error, flush=True)\n"
    )
    text = "\n".join(lines)
    assert "result (46.0, 0, 4)" in lines, text
    assert "script None" in lines
    assert "code 7" in lines
    assert "root 1 no such luck True" in lines
    assert any(line.startswith("no room the Ray cluster has no room for 3") for line in lines)
    assert sum("was here" in line for line in lines) == 4, text


def test_launch_subprocesses_on_two_raylets(driver: Driver) -> None:
    lines = driver.run(
        "from rallypoint import ray as ours\n"
        "from rallypoint.launch import MultiprocessConfig, launch_subprocesses\n"
        "cfg = MultiprocessConfig(world_size=4, local_world_size=2)\n"
        "print('all', launch_subprocesses(total, cfg, 10.0, hosts=ours), flush=True)\n"
        "cfg = MultiprocessConfig(world_size=3)\n"
        "print('packed', launch_subprocesses(total, cfg, 10.0, hosts=ours), flush=True)\n"
        "try:\n    launch_subprocesses(fails, cfg, hosts=ours.Bundles(flags=['--shutdown-timeout=2']))\n"
        "except WorkersFailed as error:\n"
        "    ids = error.report.engines['ray']\n"
        "    print('root', error.report.root_cause.rank, len(ids['job']), len(ids['node']), flush=True)\n"
    )
    text = "\n".join(lines)
    assert f"all {[(46.0, rank, 4) for rank in range(4)]}" in lines, text
    assert f"packed {[(33.0, rank, 3) for rank in range(3)]}" in lines, text
    assert "root 1 8 56" in lines, text


def test_a_raylet_that_is_lost_and_one_that_comes(driver: Driver) -> None:
    begun = driver.start(
        "trainer = RallyTrainer(stays, args=['2'], num_nodes=(1, 2), flags=['--shutdown-timeout=2'])\n"
        "fit = threading.Thread(target=lambda: print('result', trainer.fit(), flush=True))\n"
        "fit.start()\n"
        "wait_for('lose')\n"
        "cluster.remove_node(second, allow_graceful=False)\n"
        "wait_for('add')\n"
        "cluster.add_node(num_cpus=2)\n"
        "fit.join()\n"
    )

    def notes(generation: int) -> list[str]:
        return sorted(each.name[13:] for each in driver.folder.glob(f"generation-{generation}-*"))

    def wait_for(generation: int, ranks: list[str]) -> None:
        def there() -> bool:
            assert begun.poll() is None or notes(generation) == ranks, begun.communicate()[0]
            return notes(generation) == ranks

        wait_until(there, f"generation {generation} has {ranks}, and {notes(generation)}", 120)

    wait_for(0, ["0-2", "1-2"])
    (driver.folder / "lose").touch()
    wait_for(1, ["0-1"])
    (driver.folder / "add").touch()
    wait_for(2, ["0-2", "1-2"])
    out, _ = begun.communicate(timeout=120)
    assert begun.returncode == 0, out
    assert "result done by 2" in out.splitlines(), out
    driver.wait_nothing_left()


def test_workers_have_their_grace_period_to_save_when_the_driver_is_interrupted(
    driver: Driver,
) -> None:
    begun = driver.start("RallyTrainer(saves, num_nodes=2).fit()")
    wait_until(lambda: len(list(driver.folder.glob("began-*"))) == 2, "all have started")
    begun.send_signal(signal.SIGINT)
    out, _ = begun.communicate(timeout=120)
    assert "KeyboardInterrupt" in out
    assert len(list(driver.folder.glob("saved-*"))) == 2, out
    driver.wait_nothing_left()


@pytest.mark.parametrize("what", ["the driver is killed", "all of Ray is killed"])
def test_nothing_is_left(driver: Driver, what: str) -> None:
    begun = driver.start("RallyTrainer(stays, args=['-'], num_nodes=2).fit()")
    wait_until(lambda: len(list(driver.folder.glob("generation-0-*"))) == 2, "all have started")
    assert (
        len(of_the_job(driver)) >= 10
    )  # nodes, supervisors, fork servers, workers, what they started
    if what == "all of Ray is killed":
        # As `ray stop --force` does on a whole host; here in this cluster alone.
        for pid in driver.left():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(
                b"site-packages/ray/" in each or each.startswith(b"ray::") for each in words[:3]
            ):
                process_end(pid)
    begun.kill()
    begun.communicate(timeout=60)

    wait_until(
        lambda: not of_the_job(driver), f"nothing is left; there is {of_the_job(driver)}", 60
    )


def of_the_job(driver: Driver) -> list[str]:
    """What runs, apart from Ray's own processes."""
    found = []
    for pid in driver.left():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if "site-packages/ray/" not in words and not words.startswith("ray::"):
            found.append(words[:80])
    return found
