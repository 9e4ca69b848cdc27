"""A worker that all-reduces until it is stopped, with whatever unpleasantness its flags name.

It notes what it does in files in the folder WORKER_NOTES: ``loop.GENERATION.RANK`` holds its pid once
it has done a collective, ``saved.…`` says that it was told to stop and saved, ``child.PID`` and so on.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


NOTES = Path(os.environ["WORKER_NOTES"])
RANK, GENERATION = os.environ["RANK"], os.environ["RALLY_GENERATION"]

# Ignores SIGTERM, notes its pid, sleeps. Started with an empty environment.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


def note(name: str, text: str = "") -> None:
    path = NOTES / f"{name}.{GENERATION}.{RANK}"
    new = path.with_name("new-" + path.name)
    new.write_text(text or str(os.getpid()))
    new.rename(path)


def become_stubborn(name: str) -> None:
    path = str(NOTES / f"{name}.{GENERATION}.{RANK}")
    os.execve(sys.executable, [sys.executable, "-SEc", STUBBORN, path], {})


def start_daemon() -> None:
    """As daemons do: two forks, a session of its own, no streams, no environment; deaf to SIGTERM."""
    first = os.fork()
    if first == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        os.closerange(0, 1024)
        become_stubborn("daemon")
    os.waitpid(first, 0)
    wait_for_note("daemon")


def start_grandchild() -> None:
    """A child, like a DataLoader's worker, with a child of its own that is deaf to SIGTERM."""
    if os.fork() == 0:
        subprocess.Popen(
            [sys.executable, "-SEc", STUBBORN, str(NOTES / f"grandchild.{GENERATION}.{RANK}")]
        )
        time.sleep(600)
        os._exit(0)
    wait_for_note("grandchild")


def wait_for_note(name: str) -> None:
    while not (NOTES / f"{name}.{GENERATION}.{RANK}").exists():
        time.sleep(0.005)


def loader(ready) -> None:
    ready.set()
    time.sleep(600)


def start_loaders() -> None:
    """Children of multiprocessing, like a DataLoader's workers."""
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        ready = context.Event()
        context.Process(target=loader, args=(ready,), daemon=True).start()
        ready.wait()
    note("loaders")


def save() -> None:
    """Do what a trainer does when it is told to stop: take some time and write a checkpoint."""
    time.sleep(0.2)
    note("saved")


class AskedToEndError(Exception):
    pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-torch", action="store_true", help="no collectives: starts fast")
    parser.add_argument("--daemon", action="store_true")
    parser.add_argument("--grandchild", action="store_true")
    parser.add_argument("--loaders", action="store_true")
    parser.add_argument("--deaf", action="store_true", help="ignores SIGTERM and SIGINT")
    parser.add_argument("--saves", action="store_true", help="saves when asked to end")
    parser.add_argument("--ends-well", action="store_true", help="ends after one collective")
    parser.add_argument("--slow-to-stop", type=float, default=0.0)
    parser.add_argument("--generations", type=int, default=99, help="from this on it ends well")
    args = parser.parse_args()

    if args.loaders:
        start_loaders()
    if args.grandchild:
        start_grandchild()
    if args.daemon:
        start_daemon()
    if args.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if args.saves:

        def ask(*_):
            raise AskedToEndError

        signal.signal(signal.SIGTERM, ask)

    collective = (lambda: None) if args.no_torch else prepare_collective()
    try:
        collective()
        note("loop")
        if args.ends_well or int(GENERATION) >= args.generations:
            note("ended")
            # Skip torch's destructors: they abort now and then while Gloo's threads run.
            sys.stdout.flush()
            os._exit(0)
        while True:
            collective()
            time.sleep(0.002)
    except (KeyboardInterrupt, AskedToEndError):
        if not args.saves:
            raise
        save()
        os._exit(0)


def prepare_collective():
    gc.set_threshold(1_000_000)  # or a fifth of the time that torch's import takes is collections
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(8)
    return lambda: dist.all_reduce(tensor.clone())


if __name__ == "__main__":
    main()
