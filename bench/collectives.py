"""The cost of a gradient on top of a collective: ours, torch.distributed.nn.functional, and the bare collective.

Competitors alternate call by call, on the same ranks and the same tensors, over Gloo. JSON goes to stdout
(and --output), progress to stderr. See bench/README.md for the meaning of the figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import Progress, machine, publish, ratio, spread
from torch import Tensor
from torch.distributed.nn import functional as torch_nn

from rallypoint import parallel


KIB = 1024
SIZES = [4 * KIB, 64 * KIB, 1024 * KIB, 16 * 1024 * KIB]
COLUMNS = 64
LIMIT = 1.05
# Calls of each rival. One call's time varies by a quarter; a difference of a hundredth must show.
ROUNDS, ROUNDS_OF_LARGE, LARGE = 800, 30, 4 * 1024 * KIB

Call = Callable[[Tensor], Tensor]


def bare_all_to_all(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def bare_all_gather(x: Tensor) -> Tensor:
    out = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x)
    return out


def bare_reduce_scatter(x: Tensor) -> Tensor:
    out = x.new_empty((x.shape[0] // dist.get_world_size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x)
    return out


def bare_all_reduce(x: Tensor) -> Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def forward(call: Call) -> Call:
    def run(x: Tensor) -> Tensor:
        return call(x.detach())

    return run


def and_back(call: Call) -> Call:
    """Forward and backward: two collectives. The gradient exists already; nothing else is computed."""

    def run(x: Tensor) -> Tensor:
        y = call(x)
        (grad,) = torch.autograd.grad(y, x, y.detach())
        return grad

    return run


def both_bare(there: Call, back: Call) -> Call:
    def run(x: Tensor) -> Tensor:
        return back(there(x.detach()))

    return run


class Least(torch.autograd.Function):
    """The least that a gradient costs in Python: the bare calls, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return bare_all_to_all(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return bare_all_to_all(grad)


def rivals() -> dict[str, dict[str, Call]]:
    """Collective -> rival -> call. Every call takes ``[rows, COLUMNS]`` and returns a new tensor."""

    def theirs_all_to_all(x: Tensor) -> Tensor:
        return torch_nn.all_to_all_single(torch.empty_like(x), x)

    def theirs_all_gather(x: Tensor) -> Tensor:
        return torch.cat(torch_nn.all_gather(x))

    def theirs_reduce_scatter(x: Tensor) -> Tensor:
        parts = list(x.chunk(dist.get_world_size()))
        return torch_nn.reduce_scatter(torch.empty_like(parts[0]), parts)

    found: dict[str, dict[str, Call]] = {}
    for name, bare, back, ours, theirs in (
        ("all_to_all", bare_all_to_all, bare_all_to_all, parallel.all_to_all, theirs_all_to_all),
        (
            "all_gather",
            bare_all_gather,
            bare_reduce_scatter,
            parallel.all_gather,
            theirs_all_gather,
        ),
        (
            *("reduce_scatter", bare_reduce_scatter, bare_all_gather),
            *(parallel.reduce_scatter, theirs_reduce_scatter),
        ),
        ("all_reduce", bare_all_reduce, bare_all_reduce, parallel.all_reduce, torch_nn.all_reduce),
    ):
        found[name] = {"bare": forward(bare), "rallypoint": forward(ours), "torch": forward(theirs)}
        found[f"{name}, there and back"] = {
            "bare": both_bare(bare, back),
            "rallypoint": and_back(ours),
            "torch": and_back(theirs),
        }
    found["all_to_all"]["rallypoint, checks"] = forward(
        lambda x: parallel.all_to_all(x, checks=True)
    )
    found["all_to_all, there and back"]["bare in an autograd.Function"] = and_back(Least.apply)
    return found


def rank_main(pipe: Any, rank: int, size: int, meeting: str, sizes: list[int], rounds: int) -> None:
    """One rank: times every rival once per round, each call after a barrier, and sends the times to the parent."""
    warnings.simplefilter("ignore")  # torch warns about its older interfaces
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    for num_bytes in sizes:
        rows = num_bytes // (4 * COLUMNS)
        x = torch.randn(rows, COLUMNS, requires_grad=True)
        for what, calls in rivals().items():
            names = list(calls)
            times: dict[str, list[float]] = {name: [] for name in names}
            # In random order, the same on all ranks: a rival that always followed the same one would inherit its caches.
            order = random.Random(0)
            turns = rounds or (ROUNDS if num_bytes < LARGE else ROUNDS_OF_LARGE)
            for turn in range(-max(3, turns // 10), turns):
                for name in order.sample(names, len(names)):
                    dist.barrier()
                    began = time.perf_counter()
                    calls[name](x)
                    took = time.perf_counter() - began
                    if turn >= 0:
                        times[name].append(took)
            pipe.send((num_bytes, what, times))
    dist.destroy_process_group()
    pipe.send(None)


def measure(world_size: int, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    progress = Progress(len(sizes) * len(rivals()))
    pipes, processes, found = [], [], []
    with tempfile.TemporaryDirectory(prefix="rally-bench-") as folder:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main,
                args=(theirs, rank, world_size, f"{folder}/store", sizes, rounds),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            for num_bytes in sizes:
                for what in rivals():
                    progress.step(f"{what}, {num_bytes // KIB} KiB")
                    parts = [pipe.recv() for pipe in pipes]
                    assert {part[:2] for part in parts} == {(num_bytes, what)}
                    found.append(row(num_bytes, what, [part[2] for part in parts]))
            for process in processes:
                process.join(10)
        finally:
            for process in processes:
                process.kill()
            progress.close()
    return found


def row(num_bytes: int, what: str, parts: list[dict[str, list[float]]]) -> dict[str, Any]:
    """A call counts with its time on the slowest rank."""
    figures = {
        name: spread([1e6 * max(turn) for turn in zip(*(part[name] for part in parts), strict=True)], 1)
        for name in parts[0]
    }  # fmt: skip
    return {
        "what": what,
        "bytes": num_bytes,
        "us": figures,
        "over_bare": {
            name: ratio(figure, figures["bare"])
            for name, figure in figures.items()
            if name != "bare"
        },
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def over(what: str, other: str) -> float | None:
        for each in rows:
            if (each["what"], each["bytes"]) == (what, 1024 * KIB):
                return ratio(each["us"]["rallypoint"], each["us"][other])
        return None

    found = [
        ("all_to_all, 1 MiB, times the bare collective", over("all_to_all", "bare")),
        (
            "all_to_all there and back, 1 MiB, times the bare collectives in an autograd.Function",
            over("all_to_all, there and back", "bare in an autograd.Function"),
        ),
    ]
    return [
        {"what": what, "measured": value, "limit": LIMIT, "holds": None if value is None else value <= LIMIT}
        for what, value in found
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help="few rounds, as a quick check")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"calls of each competitor (default {ROUNDS}, large tensors {ROUNDS_OF_LARGE})",
    )
    parser.add_argument("--world-size", type=int, default=2, help="ranks (default 2)")
    parser.add_argument(
        "--bytes", help="bytes of the tensor on each rank, for example 4096,1048576"
    )
    args = parser.parse_args()
    sizes = [int(n) for n in args.bytes.split(",")] if args.bytes else SIZES
    rounds = args.rounds or (10 if args.quick else 0)
    result: dict[str, Any] = {
        "benchmark": "collectives",
        "quick": args.quick,
        "machine": machine(),
        "backend": "gloo",
        "world_size": args.world_size,
        "rounds": rounds or ROUNDS,
        "rounds_of_large": rounds or ROUNDS_OF_LARGE,
    }
    result["collectives"] = measure(args.world_size, sizes, rounds)
    result["targets"] = targets(result["collectives"])
    publish(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
