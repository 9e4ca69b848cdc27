"""Random kills and restarts: no process may be left, and the first restart must succeed; prints JSON.

    python bench/soak.py --quick
    python bench/soak.py --output bench/results/soak.json --seed 7

Each trial starts a job of 2 to 8 workers that run all-reduces in a loop. In half of the jobs, workers have children, daemons, and
children that ignore SIGTERM. At a random moment between the first instant and some time into the loop, the trial kills the
supervisor, the fork server, the store or a worker with SIGKILL. Two seconds later no process of the job may be left.
The exit code is 1 if anything failed. See bench/README.md.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs import (
    RALLY,
    Job,
    Progress,
    adopt_orphans,
    children,
    command_line,
    job,
    machine,
    publish,
    spread,
)


GONE_WITHIN = 2.0
MAX_WORKERS = 8
VICTIMS = ("supervisor", "fork server", "worker", "store")
# Seconds from the command to the loop of collectives, on this machine. Moments are drawn from twice this.
STARTS_WITHIN = {"forkserver": 1.5, "exec": 3.0}
END_TIMEOUT = 60.0

WORKER = """
import os, signal, subprocess, sys, time

notes, rank = os.environ["NOTES"], os.environ["RANK"]
attempt, unpleasant = os.environ["RALLY_GENERATION"], sys.argv[1] == "unpleasant"

DEAF = (
    "import os, signal, sys, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "open(sys.argv[1], 'w').write(str(os.getpid()))\\n"
    "time.sleep(600)"
)

def become_deaf(name):
    file = f"{notes}/{name}.{attempt}.{rank}"
    os.execve(sys.executable, [sys.executable, "-SEc", DEAF, file], {})

if unpleasant:
    if os.fork() == 0:  # a child with a child that is deaf to SIGTERM
        if os.fork() == 0:
            become_deaf("grandchild")
        time.sleep(600)
        os._exit(0)
    child = os.fork()
    if child == 0:  # a daemon without streams and environment
        os.setsid()
        if os.fork():
            os._exit(0)
        os.closerange(0, 1024)
        become_deaf("daemon")
    os.waitpid(child, 0)

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(8)
dist.all_reduce(tensor)
with open(f"{notes}/new.{attempt}.{rank}", "w") as file:
    file.write(f"{time.monotonic()} {os.getpid()}")
os.rename(f"{notes}/new.{attempt}.{rank}", f"{notes}/first.{attempt}.{rank}")
while attempt == "0":
    dist.all_reduce(tensor)
    time.sleep(0.001)
os._exit(0)
"""


@dataclass
class Trial:
    """One kill, and its outcome."""

    number: int
    method: str
    workers: int
    victim: str
    at: float
    unpleasant: bool
    killed_pid: int | None = None
    processes: int = 0
    seconds_until_gone: float | None = None
    left: list[str] | None = None
    exit_code: int | None = None
    problem: str = ""


def draw(chance: random.Random, number: int, quick: bool) -> Trial:
    method = chance.choice(("forkserver", "forkserver", "exec"))
    return Trial(
        number=number,
        method=method,
        workers=2 if quick else chance.randint(2, MAX_WORKERS),
        # Each in turn, so that even a few trials kill each of them.
        victim=VICTIMS[number % len(VICTIMS)],
        at=round(chance.uniform(0.0, 2 * STARTS_WITHIN[method]), 3),
        unpleasant=chance.random() < 0.5,
    )


def find_victim(running: Job, trial: Trial, chance: random.Random) -> int | None:
    """The victim's pid, once it exists: the moment drawn may be earlier."""
    if trial.victim == "supervisor":
        return running.popen.pid
    deadline = time.monotonic() + END_TIMEOUT
    while time.monotonic() < deadline and running.popen.poll() is None:
        servers = children(running.popen.pid)
        if servers:
            if trial.victim == "fork server":
                return servers[0]
            found = {pid: command_line(pid) for pid in children(servers[0])}
            stores = [
                pid
                for pid, line in found.items()
                if line.startswith("rally: store") or "store_host" in line
            ]
            workers = [pid for pid, line in found.items() if "worker.py" in line]
            workers = [
                pid for pid in workers if pid not in stores and "fork server" not in found[pid]
            ]
            chosen = stores if trial.victim == "store" else workers
            if chosen:
                return chance.choice(sorted(chosen))
        time.sleep(0.002)
    return None


def kill_trial(trial: Trial, script: Path, folder: Path, chance: random.Random) -> None:
    command = [*RALLY, "--start-method", trial.method, "--nproc-per-node", str(trial.workers)]
    command += [str(script), "unpleasant" if trial.unpleasant else "plain"]
    with job(command, folder) as running:
        time.sleep(trial.at)
        trial.killed_pid = find_victim(running, trial, chance)
        if trial.killed_pid is None:
            trial.problem = f"the {trial.victim} was never there: {tail(running)}"
            return
        trial.processes = len(running.alive())
        os.kill(trial.killed_pid, signal.SIGKILL)
        died = time.monotonic()
        while True:
            left = running.alive()
            seconds = time.monotonic() - died
            if not left:
                trial.seconds_until_gone = round(seconds, 3)
                break
            if seconds > GONE_WITHIN:
                trial.left = [f"{pid} {command_line(pid)[:100]}" for pid in left]
                trial.problem = f"{len(left)} processes left"
                break
            time.sleep(0.01)
        trial.exit_code = running.wait(END_TIMEOUT)
        if not trial.problem:
            trial.problem = check_end(trial, running)


def check_end(trial: Trial, running: Job) -> str:
    """Check what a living supervisor owes: the right exit code, and one report that names the victim."""
    if trial.victim == "supervisor":
        return "" if trial.exit_code == -signal.SIGKILL else f"exit code {trial.exit_code}"
    expected = 128 + signal.SIGKILL if trial.victim == "worker" else 1
    text = running.stderr.read_text(errors="replace")
    if trial.exit_code != expected:
        return f"exit code {trial.exit_code} instead of {expected}: {tail(running)}"
    if text.count("rally: the job failed") != 1:
        return f"not one report: {tail(running)}"
    words = {
        "worker": f"pid {trial.killed_pid}",
        "fork server": f"fork server (pid {trial.killed_pid})",
        "store": "serves the workers' store",
    }[trial.victim]
    report = text[text.index("rally: the job failed") :]
    return (
        "" if words in report else f"the report does not name the {trial.victim}: {tail(running)}"
    )


def restart_trial(
    workers: int, script: Path, folder: Path, chance: random.Random
) -> tuple[float | None, str]:
    """Seconds from a worker's death to the next generation's first all-reduce; or what went wrong."""
    command = [
        *RALLY,
        "--nproc-per-node",
        str(workers),
        "--max-restarts",
        "3",
        str(script),
        "plain",
    ]
    with job(command, folder) as running:
        firsts = running.wait_for_notes("first.0.*", workers, END_TIMEOUT)
        if firsts is None:
            return None, f"it did not start: {tail(running)}"
        time.sleep(chance.uniform(0.0, 0.5))
        victim = chance.choice(sorted(int(text.split()[1]) for text in firsts.values()))
        died = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        code = running.wait(END_TIMEOUT)
        notes = running.notes("first.1.*")
        if code != 0:
            return None, f"exit code {code}: {tail(running)}"
        if len(notes) != workers or running.notes("first.2.*"):
            return None, f"the first restart did not succeed: {tail(running)}"
    return max(float(text.split()[0]) for text in notes.values()) - died, ""


def tail(running: Job) -> str:
    return running.stderr.read_text(errors="replace")[-1500:]


def summary(trials: list[Trial]) -> dict[str, Any]:
    gone = [t.seconds_until_gone for t in trials if t.seconds_until_gone is not None]
    return {
        "trials": len(trials),
        "processes_watched": sum(trial.processes for trial in trials),
        "processes_left": sum(len(trial.left or ()) for trial in trials),
        "seconds_until_gone": spread(gone),
        "by_victim": dict(Counter(trial.victim for trial in trials)),
        "by_method": dict(Counter(trial.method for trial in trials)),
        "failures": [asdict(trial) for trial in trials if trial.problem],
        "all": [[t.victim, t.method, t.workers, t.at, t.seconds_until_gone] for t in trials],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help="4 kills and 1 restart of 2 workers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, help="number of kills (default 50)")
    parser.add_argument("--restarts", type=int, help="number of restarts (default 20)")
    args = parser.parse_args()
    trials = args.trials if args.trials is not None else 4 if args.quick else 50
    restarts = args.restarts if args.restarts is not None else 1 if args.quick else 20
    workers = 2 if args.quick else MAX_WORKERS

    adopt_orphans()
    chance = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="rally-soak-"))
    os.environ["TMPDIR"] = str(folder)  # killed jobs keep their logs there
    script = folder / "worker.py"
    script.write_text(WORKER)
    progress = Progress(trials + restarts)
    result: dict[str, Any] = {"benchmark": "soak", "seed": args.seed, "machine": machine()}
    done: list[Trial] = []
    seconds: list[float] = []
    failures: list[str] = []
    try:
        for number in range(trials):
            trial = draw(chance, number, args.quick)
            done.append(trial)
            progress.step(f"kill {trial.victim}: {trial.workers} workers, {trial.method}")
            kill_trial(trial, script, folder / f"kill{number}", chance)
        for number in range(restarts):
            progress.step(f"restart of {workers} workers ({number + 1})")
            took, problem = restart_trial(workers, script, folder / f"restart{number}", chance)
            seconds += [] if took is None else [took]
            failures += [problem] if problem else []
    finally:
        progress.close()
        shutil.rmtree(folder, ignore_errors=True)
    result["kills"] = summary(done)
    result["restarts"] = {
        "trials": restarts,
        "workers": workers,
        "first_attempt_succeeded": len(seconds),
        "death_to_next_all_reduce_s": spread(seconds),
        "failures": failures,
    }

    publish(result, args.output)
    return 1 if result["kills"]["failures"] or failures else 0


if __name__ == "__main__":
    sys.exit(main())
