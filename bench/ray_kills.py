"""Raylets killed at random under one elastic job on a real Ray cluster; prints JSON.

    python bench/ray_kills.py --kills 20 --output bench/results/ray_kills.json

A head without room for bundles and three raylets run on this machine. The workers of a ``RallyTrainer`` of one to three nodes
all-reduce in a loop and record their steps. When a raylet is killed (with all its processes, as if its machine lost power), the
job must train on without it within ``PATIENCE``. When a new raylet joins, the job must grow again. At the end the job is told to
finish; it must succeed, and no process may be left. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from jobs import Progress, machine, publish, spread


PATIENCE = 120.0
NODES = 3

TRAIN = """
import os, pathlib, sys, time
import torch, torch.distributed as dist

folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
size, generation = dist.get_world_size(), os.environ["RALLY_GENERATION"]
note, step = folder / f"steps-{generation}-{size}", 0
while True:
    over = torch.tensor([float((folder / "finish").exists())])
    dist.all_reduce(over)
    step += 1
    if dist.get_rank() == 0:
        note.write_text(str(step))
    if over:
        break
    time.sleep(0.02)
"""


class Trainer:
    """The cluster and the job on it."""

    def __init__(self, folder: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._folder = folder
        (folder / "train.py").write_text(TRAIN)
        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.raylets = [self.cluster.add_node(num_cpus=1) for _ in range(NODES)]
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.problem = ""
        self._thread = threading.Thread(target=self._fit, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _fit(self) -> None:
        from rallypoint.ray import RallyTrainer

        try:
            RallyTrainer(
                [str(self._folder / "train.py"), str(self._folder)],
                num_nodes=(1, NODES),
                flags=["--shutdown-timeout", "2", "--rdzv-conf", "last_call_timeout=1,lease=2"],
                max_losses=1000,
            ).fit()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def trains_with(self, size: int) -> bool:
        """Whether the newest generation has this size, and makes steps."""
        notes = sorted(self._folder.glob("steps-*"), key=lambda each: int(each.name.split("-")[1]))
        return bool(notes) and int(notes[-1].name.split("-")[2]) == size

    def wait_for(self, size: int) -> float | None:
        """Seconds until the job trains with this size; None: not in time."""
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE:
            if self.problem:
                return None
            if self.trains_with(size):
                return time.monotonic() - began
            time.sleep(0.05)
        return None

    def finish(self) -> bool:
        """Tell the job to finish. Returns whether it succeeds."""
        (self._folder / "finish").touch()
        self._thread.join(PATIENCE)
        return not self._thread.is_alive() and not self.problem

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


def left(mark: bytes) -> list[str]:
    """Command lines of processes that this run has started, except this one."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if mark in Path("/proc", name, "environ").read_bytes():
                found.append(Path("/proc", name, "cmdline").read_bytes().decode()[:80])
        except OSError:
            continue
    return found


def run(kills: int, seed: int) -> dict[str, Any]:
    choice, failures = random.Random(seed), []
    shrunk, grown = [], []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder))
        trainer.start()
        if trainer.wait_for(NODES) is None:
            failures.append(f"the job does not begin: {trainer.problem}")
        progress = Progress(kills)
        for number in range(0 if failures else kills):
            victim = choice.choice(trainer.raylets)
            progress.step("a raylet is killed")
            trainer.raylets.remove(victim)
            time.sleep(choice.random())
            trainer.cluster.remove_node(victim, allow_graceful=False)
            without = trainer.wait_for(NODES - 1)
            trainer.raylets.append(trainer.cluster.add_node(num_cpus=1))
            again = trainer.wait_for(NODES)
            if without is None or again is None:
                what = "does not go on" if without is None else "does not grow again"
                failures.append(f"kill {number}: the job {what}: {trainer.problem}")
                break
            shrunk.append(without)
            grown.append(again)
        progress.close()
        ended = trainer.finish()
        if not ended:
            failures.append(f"the job does not end well: {trainer.problem}")
        trainer.close()
    end = time.monotonic() + 20.0
    mark = f"RALLY_BENCH={os.environ['RALLY_BENCH']}".encode()
    while (rest := left(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    return {
        "seed": seed,
        "kills": kills,
        "survived": len(shrunk),
        "seconds_until_training_without_it": spread(shrunk) if shrunk else None,
        "seconds_until_training_with_a_new_one": spread(grown) if grown else None,
        "ended_well": ended,
        "processes_left": rest,
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    words = parser.parse_args()
    if (
        "RALLY_BENCH" not in os.environ
    ):  # set from the start, so that others inherit it from this process
        os.environ["RALLY_BENCH"] = str(os.getpid())
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import ray

    result: dict[str, Any] = {
        "what": "raylets killed at random under one elastic job",
        "machine": machine(),
        "ray": ray.__version__,
        **run(words.kills, words.seed),
    }
    result["targets"] = [
        {"what": "every kill is survived", "holds": result["survived"] == words.kills},
        {"what": "the job ends well", "holds": result["ended_well"]},
        {"what": "no process is left", "holds": not result["processes_left"]},
    ]
    return publish(result, words.output)


if __name__ == "__main__":
    sys.exit(main())
