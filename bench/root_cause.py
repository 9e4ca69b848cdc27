"""Random single faults: does the report name the worker that failed, and why? Prints JSON.

    python bench/root_cause.py --quick
    python bench/root_cause.py --faults 100 --seed 1 --output bench/results/root_cause.json

Each trial starts a job of 2 to 4 workers, on one node or two, that run all-reduces in a loop. One worker fails in one
step, and the way it fails and the way the others notice are random. The report is right if it names that worker and
shows what happened there. The result contains the wrong reports. The exit code is 1 if more than 2 of 100 were wrong.
See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs import RALLY, Progress, machine, publish


# What the worker at fault does. `work()` is a step whose own code fails.
KINDS: dict[str, str] = {
    "raise": "work()",
    "raise from": "try: {}['weights']\nexcept KeyError as e: raise RuntimeError(MARK) from e",
    "raise, slow to unwind": "try: work()\nfinally: time.sleep(random.uniform(0.2, 3))",
    "raise, slow exit handler": (
        "import atexit\natexit.register(lambda: (dist.destroy_process_group(), time.sleep(2)))\nwork()"
    ),
    "cleans up": "try: work()\nexcept Exception: dist.destroy_process_group(); time.sleep(random.uniform(0, 3)); raise",
    "cleans up for long": "try: work()\nexcept Exception: dist.destroy_process_group(); time.sleep(60); raise",
    "cleans up, then exits": (
        "try: work()\nexcept Exception: dist.destroy_process_group(); time.sleep(random.uniform(0, 3)); sys.exit(1)"
    ),
    "barrier in finally": "try: work()\nfinally: dist.barrier()",
    "print_exc and exit": "try: work()\nexcept Exception: traceback.print_exc(); sys.exit(1)",
    "print_exc, exit later": "try: work()\nexcept Exception: traceback.print_exc()\nsys.exit(1)",
    "print_exc and _exit": "try: work()\nexcept Exception: traceback.print_exc(); os._exit(1)",
    "logging and exit": "try: work()\nexcept Exception: logging.exception('failed')\nsys.exit(4)",
    "sys.exit(text)": "sys.exit(MARK)",
    "sys.exit(3) after a line": "print(MARK, file=sys.stderr)\nsys.exit(3)",
    "_exit after a line": "print(MARK, file=sys.stderr, flush=True)\nos._exit(7)",
    "argparse": (
        "p = argparse.ArgumentParser()\np.add_argument('--lr', type=float)\np.parse_args(['--lr', MARK])"
    ),
    "like Hydra": "run_and_report(work)",
    "in a thread": "t = threading.Thread(target=work)\nt.start()\nt.join()\ntime.sleep(60)",
    "in a thread, raised again": (
        "with concurrent.futures.ThreadPoolExecutor(1) as pool: pool.submit(work).result()"
    ),
    "in a child process": (
        "with concurrent.futures.ProcessPoolExecutor(1) as pool: pool.submit(work).result()"
    ),
    "in a DataLoader's worker": (
        "from torch.utils.data import DataLoader\nfor _ in DataLoader(Bad(), num_workers=1): pass"
    ),
    "a DataLoader's worker is killed": (
        "from torch.utils.data import DataLoader\nMARK = 'DataLoader worker'\n"
        "for _ in DataLoader(Bad(kill=True), num_workers=1): pass"
    ),
    "exception group": "raise ExceptionGroup('errors in a TaskGroup', [ValueError(MARK)])",
    "broken __str__": "raise Unspeakable()",
    "10 MB message": "raise ValueError(MARK + 'x' * 10_000_000)",
    "KeyboardInterrupt": "raise KeyboardInterrupt(MARK)",
    "MemoryError": "raise MemoryError(MARK)",
    "own ConnectionError": "raise ConnectionRefusedError(111, MARK)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "import ctypes; ctypes.string_at(0)",
    "SIGABRT": "os.abort()",
    "does not come to a monitored_barrier": "time.sleep(60)",
    "hangs": "time.sleep(60)",
}
# What the others do with the error that they get when a peer is lost.
OTHERS: dict[str, str] = {
    "raise": "raise",
    "wrap": "raise RuntimeError('the training step failed') from error",
    "replace": "raise RuntimeError('the training step failed')",
    "print and exit": "traceback.print_exc(); sys.exit(1)",
    "print and _exit": "traceback.print_exc(); sys.stderr.flush(); os._exit(1)",
    "clean up": "time.sleep(random.uniform(0, 1)); dist.destroy_process_group(); raise",
}
# What the report must show besides the rank; by default the mark, which is in the message.
SHOWN = {
    "SIGKILL": "SIGKILL",
    "SIGSEGV": "SIGSEGV",
    "SIGABRT": "SIGABRT",
    "broken __str__": "Unspeakable",
    "a DataLoader's worker is killed": "DataLoader worker",
    "does not come to a monitored_barrier": "never arrived",
    "hangs": "still ran when all others had failed",
}
MARK = "expected 3 channels"
SCRIPT = f"""
import argparse, concurrent.futures, datetime, logging, os, random, signal, sys, threading, time, traceback
import torch
import torch.distributed as dist

MARK = {MARK!r}
rank, who, step, kind = int(os.environ["RANK"]), *map(int, sys.argv[1:3]), sys.argv[3]

def work():
    raise ValueError(MARK)

class Unspeakable(Exception):
    def __str__(self):
        raise TypeError

class Bad(list):
    def __init__(self, kill=False):
        super().__init__(range(4))
        self.kill = kill
    def __getitem__(self, index):
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        work()

def run_and_report(function):
    try:
        function()
    except Exception:
        print("Error executing job", file=sys.stderr)
        sys.exit(1)

def fail():
    open("reached", "w").close()
    FAULT

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
tensor = torch.ones(8)
n = 0
while True:
    if n == step and rank == who:
        fail()
    try:
        if n == step and "monitored_barrier" in kind:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))
        dist.all_reduce(tensor)
    except Exception as error:
        OTHERS
    n += 1
    time.sleep(0.002)
"""
LIMIT = 2  # wrong ones, of 100
LONGEST = 150.0  # seconds for one job


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A random fault."""

    kind: str
    others: str
    nodes: int
    workers: int  # on each node
    rank: int
    step: int
    start: str


def draw(source: random.Random, kind: str) -> Fault:
    nodes = source.choice([1, 1, 2])
    workers = source.randint(1, 2) if nodes == 2 else source.randint(2, 4)
    others = source.choice(list(OTHERS))
    return Fault(
        kind=kind,
        # The barrier's own message is lost if the error is replaced.
        others="raise" if "monitored_barrier" in kind else others,
        nodes=nodes,
        workers=workers,
        # Rank 0 itself monitors the barrier.
        rank=source.randint("monitored_barrier" in kind, nodes * workers - 1),
        step=source.choice([0, 1, source.randint(2, 300)]),
        start=source.choice(["forkserver"] * 5 + ["exec"]),
    )


def indented(text: str, by: int) -> str:
    return text.replace("\n", "\n" + " " * by)


def run(fault: Fault, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    script = SCRIPT.replace("FAULT", indented(KINDS[fault.kind], 4))
    (folder / "train.py").write_text(script.replace("OTHERS", indented(OTHERS[fault.others], 8)))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    began = time.monotonic()
    nodes = []
    for node_rank in range(fault.nodes):
        where = ["--nnodes", "2", "--node-rank", str(node_rank), "--master-addr", "127.0.0.1"]
        where += ["--master-port", str(port)]
        command = [*RALLY, *(where if fault.nodes == 2 else []), "--start-method", fault.start]
        command += ["--nproc-per-node", str(fault.workers), "--log-dir", f"logs-{node_rank}"]
        command += ["train.py", str(fault.rank), str(fault.step), fault.kind]
        with (folder / f"stderr-{node_rank}").open("wb") as stderr:
            nodes.append(
                subprocess.Popen(
                    command, cwd=folder, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr
                )
            )
    codes = []
    for node in nodes:
        try:
            codes.append(node.wait(LONGEST))
        except subprocess.TimeoutExpired:
            node.kill()
            codes.append(None)
    seconds = round(time.monotonic() - began, 2)
    reports = [judge(fault, folder, node_rank) for node_rank in range(fault.nodes)]
    wrong = [why for why in reports if why]
    reached = (folder / "reached").exists()  # if not, there is nothing to judge
    return {**asdict(fault), "codes": codes, "seconds": seconds, "reached": reached, "wrong": wrong}


def judge(fault: Fault, folder: Path, node_rank: int) -> str:
    """Why a node's report is wrong; empty if it is right."""
    said = (folder / f"stderr-{node_rank}").read_text(errors="replace")
    _, found, report = said.partition("rally: the job failed")
    files = list((folder / f"logs-{node_rank}").glob("*/report.json"))
    if not (found and files):
        return f"no report: {said[-2000:]}"
    root = json.loads(files[0].read_text())["root_cause"]
    flat = " ".join(report.split())
    shown = SHOWN.get(fault.kind, MARK)
    if (
        fault.kind == "hangs" or "monitored_barrier" in fault.kind
    ):  # no one can know the cause, but the report must show this rank
        right = f"rank {fault.rank} {shown}" in flat
    else:
        right = root is not None and root["rank"] == fault.rank and shown in flat
    return "" if right else f"node {node_rank}: {found}{report[:3000]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="six faults, as a quick check")
    parser.add_argument(
        "--minutes", type=float, help="start no more trials after this many minutes"
    )
    parser.add_argument(
        "--at-once", type=int, default=2, help="number of jobs that run at the same time"
    )
    parser.add_argument("--kind", help="only this kind of fault")
    args = parser.parse_args()
    count = 6 if args.quick else args.faults
    source = random.Random(args.seed)
    # Each kind about as often as any other, in random order.
    kinds = [args.kind] if args.kind else list(KINDS)
    plan: list[str] = []
    while len(plan) < count:
        plan += source.sample(kinds, len(kinds))
    faults = [draw(source, kind) for kind in plan[:count]]

    folder = Path(tempfile.mkdtemp(prefix="rally-root-cause-"))
    os.environ["TMPDIR"] = str(folder)
    os.environ.pop("PYTHONUNBUFFERED", None)
    progress, lock = Progress(len(faults)), threading.Lock()
    trials: list[dict[str, Any]] = []

    def trial(number: int) -> None:
        fault = faults[number]
        if args.minutes is not None and time.monotonic() - began > 60 * args.minutes:
            return
        with lock:
            wrong = sum(bool(each["wrong"]) for each in trials)
            of = f"rank {fault.rank} of {fault.nodes * fault.workers}"
            progress.step(f"{fault.kind}, {of}; {wrong} wrong so far")
        result = run(fault, folder / str(number))
        with lock:
            trials.append(result)

    began = time.monotonic()
    try:
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(trial, range(len(faults))))
    finally:
        progress.close()
        shutil.rmtree(folder, ignore_errors=True)
    not_reached = [each for each in trials if not each["reached"]]
    trials = [each for each in trials if each["reached"]]
    wrong = [trial for trial in trials if trial["wrong"]]
    right_of = Counter(trial["kind"] for trial in trials if not trial["wrong"])
    total = Counter(trial["kind"] for trial in trials)
    result = {
        "benchmark": "root_cause",
        "seed": args.seed,
        "at_once": args.at_once,
        "machine": machine(),
        "faults": len(trials),
        "named_right": len(trials) - len(wrong),
        "by_kind": {kind: f"{right_of[kind]} of {total[kind]}" for kind in sorted(total)},
        "two_nodes": sum(trial["nodes"] == 2 for trial in trials),
        "wrong": wrong,
        "not_reached": not_reached,
        "trials": [{k: v for k, v in trial.items() if k != "wrong"} for trial in trials],
        "targets": [
            {
                "what": "root causes named wrong, of 100",
                "measured": 100 * len(wrong) / len(trials),
                "limit": LIMIT,
                "holds": 100 * len(wrong) / len(trials) <= LIMIT,
            }
        ],
    }
    return int(publish(result, args.output) > 0)


if __name__ == "__main__":
    sys.exit(main())
