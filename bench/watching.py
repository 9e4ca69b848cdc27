"""What it costs a job that its supervisor watches it: step times while it is asked, and while it is not; prints JSON.

    python bench/watching.py
    python bench/watching.py --output bench/results/watching.json

One job of two workers trains a small model with DDP. In turn, for some seconds, it is asked for everything that `rally top` and a
hang watch ask, ten times as often as they do, and left alone. Compared are the median steps of the turns: neighbours saw the same machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs import RALLY, Progress, machine, publish, spread


WORKERS = 2
TURN = 3.0  # seconds
# `rally top` asks every 2 s, and the hang watch every 15 s.
EVERY = 0.2


def work(folder: Path) -> None:
    """A worker: steps until it is told to stop, the times of rank 0's into a file."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 256)
    times = []
    going = torch.ones(1)
    (folder / f"begun-{dist.get_rank()}").touch()
    while going.item():
        for _ in range(20):
            began = time.monotonic()
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append((began, time.monotonic() - began))
        going.fill_(not (folder / "stop").exists())
        dist.all_reduce(going, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        (folder / "times").write_text("\n".join(f"{at} {took}" for at, took in times))


def measure(turns: int) -> dict[str, Any]:
    from rallypoint.launch import connect

    name = f"watching-{os.getpid()}"
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        words = [*RALLY, "--nproc-per-node", str(WORKERS), "--rdzv-id", name]
        job = subprocess.Popen([*words, __file__, "--worker", base])
        try:
            while not all((folder / f"begun-{rank}").exists() for rank in range(WORKERS)):
                time.sleep(0.1)
            time.sleep(1.0)
            asked = connect(name)
            spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            progress = Progress(2 * turns)
            for turn in range(2 * turns):
                progress.step("asked" if turn % 2 else "left alone")
                began = time.monotonic()
                while time.monotonic() - began < TURN:
                    if turn % 2:
                        asked.usage()
                    time.sleep(EVERY)
                spans[bool(turn % 2)].append((began, time.monotonic()))
            progress.close()
            (folder / "stop").touch()
            job.wait(60)
        finally:
            job.kill()
            job.wait()
        lines = [line.split() for line in (folder / "times").read_text().splitlines()]
    steps = [(float(at), float(took)) for at, took in lines]

    def median(span: tuple[float, float]) -> float:
        return statistics.median(took for at, took in steps if span[0] <= at < span[1])

    alone, busy = (list(map(median, spans[each])) for each in (False, True))
    ratios = [two / one - 1 for one, two in zip(alone, busy, strict=True)]
    return {
        "step_ms_alone": spread([each * 1e3 for each in alone]),
        "step_ms_asked": spread([each * 1e3 for each in busy]),
        "cost": spread(ratios, 4),
        "cost_as_often_as_usual": round(statistics.median(ratios) / 10, 5),
        "turns": turns,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10, help="turns of each kind")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return 0
    return publish({**machine(), "ask_every_s": EVERY, **measure(args.turns)}, args.output)


if __name__ == "__main__":
    sys.exit(main())
