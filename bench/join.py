"""The cost of joining per training step, compared with torch's Join, in one run; prints JSON.

    python bench/join.py --quick
    python bench/join.py --output bench/results/join.json

Two ranks train two equal networks with DistributedDataParallel and Gloo on the CPU, alternating between the networks
step by step. One network is joined, by torch's Join or by ours; which one changes from block to block. Inputs are
even, so that only the overhead is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
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
# Seconds for which each variant is measured (more for the promised ones), and the number of blocks.
SECONDS, SECONDS_PROMISED, BLOCKS = 3.0, 12.0, 10
LEAST_STEPS = 4
# For the measurement on one rank. Its network is small, so that a step contains little else.
ALONE_STEPS, ALONE_WIDTH = 1000, 8
# Steps that are not measured: DDP rebuilds its buckets, caches fill.
WARM_UP = 10

# Makes the batches of a block, from the model, a batch and the number of steps.
Block = Callable[[Any, torch.Tensor, int], AbstractContextManager[Iterator[torch.Tensor]]]


# -- how one of the two networks is joined --------------------------------------------------------


def repeated(x: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    return iter([x] * steps)


@contextmanager
def torch_join(
    model: Any, x: torch.Tensor, steps: int, *, throw: bool = False
) -> Iterator[Iterator[torch.Tensor]]:
    before = model._join_config  # noqa: SLF001  # torch leaves it on, and later blocks would pay
    try:
        with TorchJoin([model], throw_on_early_termination=throw):
            yield repeated(x, steps)
    finally:
        model._join_config = before  # noqa: SLF001


@contextmanager
def classic(
    model: Any, x: torch.Tensor, steps: int, *, throw: bool = False
) -> Iterator[Iterator[torch.Tensor]]:
    with Join([model], throw_on_early_termination=throw):
        yield repeated(x, steps)


@contextmanager
def planned(
    model: Any, x: torch.Tensor, steps: int, *, throw: bool = False
) -> Iterator[Iterator[torch.Tensor]]:
    with Join([model], steps=steps, throw_on_early_termination=throw):
        yield repeated(x, steps)


@contextmanager
def batches(model: Any, x: torch.Tensor, steps: int) -> Iterator[Iterator[torch.Tensor]]:
    with Join([model], weighting="samples") as join:
        yield iter(join.batches([x] * steps))


@contextmanager
def nothing(model: Any, x: torch.Tensor, steps: int) -> Iterator[Iterator[torch.Tensor]]:
    yield repeated(x, steps)


def with_throw(block: Callable[..., Any]) -> Block:
    return lambda model, x, steps: block(model, x, steps, throw=True)


PROMISED = ("planned", "planned, join.batches, samples")
VARIANTS: dict[str, Block] = {
    # The other network is not joined either, which shows the measurement's own error.
    "nothing": nothing,
    "planned": planned,
    "planned, join.batches, samples": batches,
    "torch": torch_join,
    "classic": classic,
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


def step(model: nn.Module, given: Iterator[torch.Tensor]) -> float:
    began = time.perf_counter()
    model(next(given)).sum().backward()
    return time.perf_counter() - began


def network(width: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, width)))


def measure(width: int, scale: float) -> dict[str, Any]:
    """Seconds of each step, for the joined network and for the other."""
    pair = [network(width), network(width)]
    x = torch.randn(BATCH, width)
    for model in pair:
        seconds = sum(step(model, repeated(x, 1)) for _ in range(WARM_UP)) / WARM_UP
    found: dict[str, dict[str, list[float]]] = {}
    for name, block in VARIANTS.items():
        budget = scale * (SECONDS_PROMISED if name in ("nothing", *PROMISED) else SECONDS)
        wanted = torch.tensor([max(LEAST_STEPS, int(budget / BLOCKS / (2 * seconds)))])
        dist.broadcast(wanted, 0)
        steps = int(wanted.item())
        times: dict[str, list[float]] = {"joined": [], "plain": []}
        for turn in range(BLOCKS):
            joined, plain = pair[turn % 2], pair[1 - turn % 2]
            with block(joined, x, steps) as given:
                others = repeated(x, steps)
                for index in range(steps):
                    # The two alternate in going first.
                    both = [("joined", joined, given), ("plain", plain, others)]
                    for kind, model, its in both if index % 2 else reversed(both):
                        times[kind].append(step(model, its))
        found[name] = times
    return {"seconds": found}


def measure_alone(pipe: Connection, meeting: str, scale: float) -> None:
    """The extra cost of a step in microseconds, in a group of one rank, where no other process can disturb it.

    The code that runs in a step is the same, and costs nothing but time on this processor.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, 1), rank=0, world_size=1)
    steps = max(LEAST_STEPS, int(scale * ALONE_STEPS))
    pair = [network(ALONE_WIDTH), network(ALONE_WIDTH)]
    x = torch.randn(BATCH, ALONE_WIDTH)
    for model in pair:
        for _ in range(WARM_UP):
            step(model, repeated(x, 1))
    found: dict[str, float] = {}
    for name in ("nothing", *PROMISED):
        times: dict[str, list[float]] = {"joined": [], "plain": []}
        for turn in range(BLOCKS):
            joined, plain = pair[turn % 2], pair[1 - turn % 2]
            with VARIANTS[name](joined, x, steps) as given:
                others = repeated(x, steps)
                for index in range(steps):
                    both = [("joined", joined, given), ("plain", plain, others)]
                    for kind, model, its in both if index % 2 else reversed(both):
                        times[kind].append(step(model, its))
        extra = statistics.median(times["joined"]) - statistics.median(times["plain"])
        found[name] = round(1e6 * extra, 2)
    dist.destroy_process_group()
    pipe.send(found)


def alone(scale: float) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=measure_alone, args=(theirs, str(Path(folder) / "store"), scale), daemon=True
        )
        process.start()
        theirs.close()
        found: dict[str, float] = ours.recv()
        process.join(30)
    return found


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
    """Medians over steps. A step counts with the slower rank's time, since the other only waits for it."""
    found: dict[str, Any] = {"width": width, "variants": {}}
    for name in VARIANTS:
        slower = {
            kind: [
                1e3 * max(each)
                for each in zip(*(a["seconds"][name][kind] for a in answers), strict=True)
            ]
            for kind in ("joined", "plain")
        }
        found["variants"][name] = {
            "joined_step_ms": spread(slower["joined"], 4),
            "plain_step_ms": spread(slower["plain"], 4),
            "times_plain": round(
                statistics.median(slower["joined"]) / statistics.median(slower["plain"]), 4
            ),
        }
    return found


def targets(rows: list[dict[str, Any]], extra_us: dict[str, float]) -> list[dict[str, Any]]:
    """Of the two measurements of a joined step, this judges the one on a single rank: its noise is far below 1 %."""
    checks = []
    for found in rows:
        width = found["width"]
        times = {name: each["times_plain"] for name, each in found["variants"].items()}
        for name in PROMISED:
            plain = 1e3 * found["variants"][name]["plain_step_ms"]["median"]
            what = f"{name}: step at width {width}, times plain (extra time on one rank)"
            checks.append((what, round(1 + extra_us[name] / plain, 4), 1.01))
        what = f"planned, throw: at width {width}, times torch's throw"
        checks.append((what, round(times["planned, throw"] / times["torch, throw"], 4), 1.0))
    return [
        {"what": what, "measured": value, "limit": limit, "holds": value <= limit}
        for what, value, limit in checks
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument(
        "--quick", action="store_true", help="one width and few blocks, as a quick check"
    )
    args = parser.parse_args()
    widths, scale = ([64], 0.02) if args.quick else (WIDTHS, 1.0)
    progress = Progress(len(widths))
    result: dict[str, Any] = {
        "benchmark": "join",
        "quick": args.quick,
        "machine": machine(),
        "ranks": RANKS,
        "batch": BATCH,
        "layers": 3,
        "blocks": BLOCKS,
    }
    rows = []
    with closing(progress), ranks() as pipes:
        for width in widths:
            progress.step(f"width {width}")
            for pipe in pipes:
                pipe.send((width, scale))
            rows.append(row(width, [pipe.recv() for pipe in pipes]))
    result["extra_us_on_one_rank"] = alone(scale)
    result["widths"] = rows
    result["targets"] = [] if args.quick else targets(rows, result["extra_us_on_one_rank"])
    publish(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
