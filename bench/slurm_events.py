"""A series of random events on one elastic job of a real Slurm cluster; prints JSON.

    python bench/slurm_events.py --cluster "sudo ./lab.sh" --events 30 --seed 7 --output bench/results/slurm_events.json

``--cluster`` is the command that controls a test cluster: ``CMD login WORDS…`` runs a program on the login node,
``CMD kill-node K`` stops node K as if its power failed, ``CMD start-node K`` starts it again. The cluster has nodes cn1 to
cn4, a default partition whose jobs are requeued when preempted, and a partition ``high`` that preempts. A requeued job waits
two minutes by default: ``AuthInfo=…,cred_expire=10`` in slurm.conf shortens that.

The job of up to four nodes trains with gloo, commits a checkpoint every ten steps, and a last one when it gets SIGTERM. Events:
scancel, requeue, preemption, the time limit, a node is killed, a node comes back. After each the job must train again
within ``PATIENCE``, not below the last committed step; if Slurm gave grace, the last checkpoint must have been written.
The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from jobs import Progress, machine, publish, spread


PATIENCE = 150.0
KINDS = ("scancel", "requeue", "preempt", "kill node", "resume node", "time limit")
# Events that end the whole job, with SIGTERM and time to save.
WITH_GRACE = {"scancel", "requeue", "preempt", "time limit"}

TRAIN = """
import json, os, signal, sys, time
import torch, torch.distributed as dist

folder = sys.argv[1]
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

def note(what, step):
    if rank:
        return
    line = {"what": what, "step": step, "world": world, "job": os.environ["SLURM_JOB_ID"]}
    line |= {"generation": int(os.environ["RALLY_GENERATION"]), "pid": os.getpid()}
    with open(f"{folder}/log", "a") as file:
        file.write(json.dumps(line) + "\\n")

def save(what, step):
    if rank == 0:
        with open(f"{folder}/new", "w") as file:
            file.write(str(step))
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{folder}/new", f"{folder}/checkpoint")
    dist.barrier()
    note(what, step)

start = torch.zeros(1)
if rank == 0 and os.path.exists(f"{folder}/checkpoint"):
    start += int(open(f"{folder}/checkpoint").read())
dist.broadcast(start, 0)
step = int(start)
note("start", step)
while True:
    asked = torch.full((1,), float(len(told)))
    dist.all_reduce(asked)
    step += 1
    if asked:
        save("last", step)
        os._exit(0)
    if step % 10 == 0:
        save("commit", step)
    time.sleep(0.02)
"""


class Cluster:
    """The test cluster, and the job on it."""

    def __init__(self, command: str, folder: Path) -> None:
        self._command = shlex.split(command)
        self._folder = folder
        self.down: list[int] = []
        self._gone: set[int] = (
            set()
        )  # nodes that the job has lost, which Slurm does not give back to it
        self.job = ""
        (folder / "train.py").write_text(TRAIN)
        (folder / "job.sh").write_text(
            "#!/bin/bash\nexec srun --no-kill --kill-on-bad-exit=0"
            f" {sys.executable} -m rallypoint run --nnodes 2:4 --insecure --max-restarts 1000"
            f" --shutdown-timeout 4 {folder}/train.py {folder}\n"
        )

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [*self._command, *words], capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def login(self, *words: str) -> str:
        return self.run("login", *words)

    def submit(self) -> None:
        words = ("sbatch", "--parsable", "--nodes=4", "--ntasks-per-node=1", "--no-kill")
        words += ("--requeue", "--open-mode=append", f"--output={self._folder}/out")
        self.job = self.login(*words, str(self._folder / "job.sh")).strip().splitlines()[-1]

    def state(self) -> str:
        told = self.login("scontrol", "show", "job", self.job)
        found = [word for word in told.split() if word.startswith("JobState=")]
        return found[0].partition("=")[2] if found else told

    def log(self) -> list[dict[str, Any]]:
        path = self._folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def happen(self, kind: str, choice: random.Random) -> None:
        if kind in WITH_GRACE:
            self._gone.clear()  # it starts again, on all nodes
        match kind:
            case "scancel":
                self.login("scancel", self.job)
            case "requeue":
                self.login("scontrol", "requeue", self.job)
            case "preempt":
                words = ("--partition=high", "--nodes=4", "--exclusive", "--wrap", "sleep 2")
                self.login("sbatch", *words, "--output=/dev/null")
            case "time limit":
                self.login("scontrol", "update", f"JobId={self.job}", "TimeLimit=1")
            case "kill node":
                node = choice.choice(sorted({1, 2, 3, 4} - self._gone - {*self.down}))
                self.down.append(node)
                self._gone.add(node)
                self.run("kill-node", str(node))
            case "resume node":
                while self.down:
                    node = self.down.pop()
                    # A job that lost this node does not get it back, so it stays in _gone.
                    self._start(node)

    def _start(self, node: int) -> None:
        words = [*self._command, "start-node", str(node)]
        out = subprocess.DEVNULL
        subprocess.run(words, stdin=out, stdout=out, stderr=out, timeout=60, check=False)

    def push(self) -> None:
        """Submit the job again if it has ended. A requeued one waits as long as ``AuthInfo=cred_expire`` says."""
        if self.state() in {"CANCELLED", "TIMEOUT", "FAILED", "COMPLETED", "NODE_FAIL"}:
            self.submit()


def trains_again(cluster: Cluster, seen: int, restarts: bool) -> tuple[list[dict[str, Any]], float]:
    """The notes since ``seen`` once the job has committed again, after a new start if it ``restarts``; and how long it took."""
    began = time.monotonic()
    while (took := time.monotonic() - began) < PATIENCE:
        new = cluster.log()[seen:]
        starts = [i for i, each in enumerate(new) if each["what"] == "start"]
        since = new[starts[-1] :] if starts else [] if restarts else new
        if any(each["what"] == "commit" for each in since):
            return new, took
        if restarts:
            cluster.push()
        time.sleep(1.0)
    return cluster.log()[seen:], -1.0


def judge(kind: str, before: list[dict[str, Any]], new: list[dict[str, Any]]) -> dict[str, Any]:
    """What an event cost: how many committed steps were lost, and whether the job saved at the end."""
    saved = [each["step"] for each in before if each["what"] != "start"]
    lost = 0
    for each in new:
        if each["what"] == "start":
            lost = max(lost, max(saved, default=0) - each["step"])
        else:
            saved.append(each["step"])
    has_last = any(each["what"] == "last" for each in new)
    return {"lost": lost, "last": has_last if kind in WITH_GRACE else None}


def allowed(kind: str, cluster: Cluster) -> bool:
    # Slurm takes a while to notice a dead node, and until then would start a job on it.
    if kind == "resume node":
        return bool(cluster.down)
    if kind == "kill node":
        return len(cluster.down) < 2 and cluster.log()[-1]["world"] > 2
    return not cluster.down


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cluster", required=True, help="the command that drives the cluster")
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no event after this")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    choice = random.Random(given.seed)
    folder = Path(tempfile.mkdtemp(prefix="slurm-events-"))
    about = machine()
    cluster = Cluster(given.cluster, folder)
    progress = Progress(given.events)
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    failures: list[dict[str, Any]] = []
    losses = num_last = num_grace = hangs = 0
    end = time.monotonic() + 60 * given.minutes
    try:
        cluster.submit()
        trains_again(cluster, 0, restarts=True)
        for number in range(given.events):
            if time.monotonic() > end:
                break
            kinds = [each for each in KINDS if allowed(each, cluster)]
            # The rarest kinds first, so that all happen about equally often.
            kind = min(kinds, key=lambda each: (counts[each], choice.random()))
            progress.step(kind)
            before = cluster.log()
            cluster.happen(kind, choice)
            new, took = trains_again(cluster, len(before), restarts=kind != "resume node")
            found = judge(kind, before, new)
            counts[kind] += 1
            hangs += took < 0
            losses += found["lost"]
            num_grace += found["last"] is not None
            num_last += bool(found["last"])
            seconds[kind].append(took)
            if took < 0 or found["lost"] or found["last"] is False:
                failures.append({"event": number, "kind": kind, "seconds": took, **found})
                print(failures[-1], file=sys.stderr, flush=True)
            if took < 0:
                print((folder / "out").read_text()[-4000:], file=sys.stderr)
                break
    finally:
        cluster.login("scancel", cluster.job)
        cluster.happen("resume node", choice)
        progress.close()
    result = {
        "what": "random events on an elastic job of a real Slurm cluster",
        "machine": about,
        "slurm": cluster.login("sinfo", "--version").strip(),
        "seed": given.seed,
        "events": sum(counts.values()),
        "kinds": dict(counts),
        "hangs": hangs,
        "committed_steps_lost": losses,
        "with_grace": num_grace,
        "last_checkpoints": num_last,
        "seconds_until_training": {kind: spread(each) for kind, each in seconds.items()},
        "failures": failures,
        "targets": [
            {"what": "no hang", "holds": hangs == 0},
            {"what": "no committed step lost", "holds": losses == 0},
            {"what": "a last checkpoint whenever there was grace", "holds": num_last == num_grace},
        ],
    }
    return 1 if publish(result, given.output) else 0


if __name__ == "__main__":
    os.environ.pop("SLURM_JOB_ID", None)
    sys.exit(main())
