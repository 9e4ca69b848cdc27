"""A worker that counts the signals it gets and, on one that ends jobs, writes a last checkpoint with the others.

In the folder WORKER_NOTES: ``loop.GENERATION.RANK`` (its pid, once it trains), ``count.NUMBER.RANK`` (how often that
signal has arrived), ``saved.GENERATION.RANK`` (what it got before it saved).
"""

import gc
import os
import signal
import sys
import time
from pathlib import Path


gc.disable()  # collections are a third of the time that these imports take

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


gc.enable()

NOTES = Path(os.environ["WORKER_NOTES"])
RANK, GENERATION = os.environ["RANK"], os.environ["RALLY_GENERATION"]
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
OTHERS = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCONT, signal.SIGRTMIN}

counts: dict[int, int] = {}


def note(name, text):
    path = NOTES / f"{name}.{RANK}"
    fresh = path.with_name("new-" + path.name)
    fresh.write_text(str(text))
    fresh.rename(path)


def count(number, _frame):
    counts[number] = counts.get(number, 0) + 1
    note(f"count.{int(number)}", counts[number])


def main():
    for number in ENDING | OTHERS:
        signal.signal(number, count)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    note(f"loop.{GENERATION}", os.getpid())
    asked = torch.zeros(1)
    while not asked:
        asked += sum(counts.get(number, 0) for number in ENDING)
        dist.all_reduce(asked)
        time.sleep(0.02)
    # A checkpoint in several parts makes groups of its own, which need the workers' store.
    dist.barrier(group=dist.new_group())
    time.sleep(0.5)  # a second signal would arrive now
    note(f"saved.{GENERATION}", " ".join(f"{int(n)}:{counts[n]}" for n in sorted(counts)))
    sys.stdout.flush()
    os._exit(0)


main()
