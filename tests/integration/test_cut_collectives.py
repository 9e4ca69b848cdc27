"""Collectives over Gloo whose connections are shut midway: all waits for them are given up at once."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, closing

import pytest

from pace import pace
from tcp_stores import ServedStore


# As in a session when nodes arrive: nobody is lost, and each process shuts its own connections, in its own time.
SCRIPT = """
import os, random, sys, threading, time
from datetime import timedelta
import torch
from rallypoint.elastic.communication.connections import Wiring
from rallypoint.elastic.communication.kept_group import KeptGroup

rank, port, operation, rounds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
rng, worst = random.Random(rank), 0.0
timeout = timedelta(seconds=60)
for number in range(rounds):
    group = KeptGroup("g", rank, (0, 1), timeout, {"cpu": "gloo"}, is_for_session=True)
    wiring = Wiring("127.0.0.1", port, f"round {number}", number)
    group.connect(wiring)
    wiring.gather(2, 60.0, "connected")
    x, y = torch.ones(1000), torch.zeros(500 if operation.startswith("reduce") else 2000)
    cut_at = []

    def cut():
        cut_at.append(time.monotonic())
        while not is_over.wait(0):
            wiring.cut()
            is_over.wait(0.25)

    is_over = threading.Event()
    timer = threading.Timer(rng.uniform(0.0, 0.03), cut)
    timer.start()
    try:
        while True:
            getattr(group, operation)(y, x).wait()
    except RuntimeError:
        # The other one may be cut first.
        timer.join(0.05)
        worst = max(worst, time.monotonic() - cut_at[0]) if cut_at else worst
    is_over.set()
    timer.join()
    group.disconnect(None)  # a thread waits for what was given up
print(worst, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("operation", ["reduce_scatter_single", "all_gather_single"])
def test_nobody_waits_for_what_cannot_come(operation: str) -> None:
    with ExitStack() as stack:
        store = stack.enter_context(closing(ServedStore()))
        two = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", SCRIPT, str(rank), str(store.port), operation, "40"],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        stack.callback(lambda: [each.kill() for each in two])
        worst = [float(each.communicate(timeout=300)[0]) for each in two]
    assert max(worst) < 2.0 * pace(), worst
