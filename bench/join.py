"""What joining costs per training step, beside torch's Join, in one run; prints JSON.

    python bench/join.py --quick
    python bench/join.py --output bench/results/join.json

Two ranks train a small network with DistributedDataParallel and Gloo on the CPU. Blocks of steps without
Join, under torch's and under ours take turns, in another order each time; inputs are even, so that
nothing but the cost of being prepared is measured. A step's time is that of its block, entry and exit left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import Progress, machine, publish, spread
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

from rallypoint.join import Join


WIDTHS = [64, 256, 512, 1024, 2048]
RANKS = 2
BATCH = 32
# A block takes about so long, and has at least so many steps.
BLOCK_SECONDS, LEAST_STEPS = 0.25, 6
REPEATS = 40
# Not measured: DDP rebuilds its buckets, caches fill.
WARM_UP = 10

Block = Callable[[Any, torch.Tensor, int], float]


# -- one block of steps ---------------------------------------------------------------------------


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def timed(model: nn.Module, batches: Iterator[torch.Tensor]) -> float:
    """Seconds for all but the first step, which may still wait for the other rank."""
    step(model, next(batches))
    began = time.perf_counter()
    for x in batches:
        step(model, x)
    return time.perf_counter() - began


def none(model: Any, x: torch.Tensor, steps: int) -> float:
    return timed(model, iter([x] * steps))


def torch_join(model: Any, x: torch.Tensor, steps: int, *, throw: bool = False) -> float:
    before = model._join_config  # noqa: SLF001  # torch leaves it on, and later blocks would pay
    try:
        with TorchJoin([model], throw_on_early_termination=throw):
            return timed(model, iter([x] * steps))
    finally:
        model._join_config = before  # noqa: SLF001


def classic(model: Any, x: torch.Tensor, steps: int, *, throw: bool = False) -> float:
    with Join([model], throw_on_early_termination=throw):
        return timed(model, iter([x] * steps))


def planned(model: Any, x: torch.Tensor, steps: int, *, throw: bool = False) -> float:
    with Join([model], steps=steps, throw_on_early_termination=throw):
        return timed(model, iter([x] * steps))


def batches(model: Any, x: torch.Tensor, steps: int) -> float:
    with Join([model], weighting="samples") as join:
        return timed(model, iter(join.batches([x] * steps)))


def with_throw(block: Callable[..., float]) -> Block:
    return lambda model, x, steps: block(model, x, steps, throw=True)


VARIANTS: dict[str, Block] = {
    "none": none,
    "torch": torch_join,
    "classic": classic,
    "planned": planned,
    "planned, join.batches, samples": batches,
    "torch, throw": with_throw(torch_join),
    "classic, throw": with_throw(classic),
    "planned, throw": with_throw(planned),
}


# -- a rank ---------------------------------------------------------------------------------------


def rank_main(pipe: Connection, rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(meeting, RANKS), rank=rank, world_size=RANKS
    )
    while (work := pipe.recv()) is not None:
        pipe.send(measure(*work))
    dist.destroy_process_group()


def measure(width: int, repeats: int) -> dict[str, Any]:
    """Seconds per step of each variant, one for each block."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, width)))
    x = torch.randn(BATCH, width)
    seconds = none(model, x, WARM_UP) / (WARM_UP - 1)
    wanted = torch.tensor([max(LEAST_STEPS, int(BLOCK_SECONDS / seconds))])
    dist.broadcast(wanted, 0)
    steps = int(wanted.item())
    order = random.Random(width)
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(repeats):
        for name in order.sample(list(VARIANTS), len(VARIANTS)):
            found[name].append(VARIANTS[name](model, x, steps) / (steps - 1))
    return {"steps": steps, "seconds": found}


@contextmanager
def ranks() -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main, args=(theirs, rank, str(Path(folder) / "store")), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            yield pipes
            for pipe in pipes:
                pipe.send(None)
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                process.kill()


# -- figures --------------------------------------------------------------------------------------


def row(width: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over blocks; the slower rank's where they differ, since the other only waits for it."""
    blocks = {
        name: [max(each) for each in zip(*(a["seconds"][name] for a in answers), strict=True)]
        for name in VARIANTS
    }
    base = blocks["none"]
    return {
        "width": width,
        "steps_per_block": answers[0]["steps"],
        "step_ms": {name: spread([1e3 * s for s in values], 4) for name, values in blocks.items()},
        # Of neighbours in time: what slows the machine down for a while slows both.
        "times_none": {
            name: round(statistics.median(a / b for a, b in zip(values, base, strict=True)), 4)
            for name, values in blocks.items()
        },
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    checks = []
    for found in rows:
        width, times = found["width"], found["times_none"]
        checks += [
            (f"{name}: step at width {width}, times none", times[name], 1.01)
            for name in ("planned", "planned, join.batches, samples")
        ]
        medians = {name: each["median"] for name, each in found["step_ms"].items()}
        checks.append(
            (
                f"planned, throw: step at width {width}, times torch's throw",
                round(medians["planned, throw"] / medians["torch, throw"], 4),
                1.0,
            )
        )
    return [
        {"what": what, "measured": value, "limit": limit, "holds": value <= limit}
        for what, value, limit in checks
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    parser.add_argument(
        "--quick", action="store_true", help="one width, few blocks: does it work at all"
    )
    args = parser.parse_args()
    widths, repeats = ([64], 3) if args.quick else (WIDTHS, REPEATS)
    progress = Progress(len(widths))
    result: dict[str, Any] = {
        "benchmark": "join",
        "quick": args.quick,
        "machine": machine(),
        "ranks": RANKS,
        "batch": BATCH,
        "layers": 3,
        "blocks": repeats,
    }
    rows = []
    with closing(progress), ranks() as pipes:
        for width in widths:
            progress.step(f"width {width}")
            for pipe in pipes:
                pipe.send((width, repeats))
            rows.append(row(width, [pipe.recv() for pipe in pipes]))
    result["widths"] = rows
    result["targets"] = [] if args.quick else targets(rows)
    publish(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
