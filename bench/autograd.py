"""Gradients through calls: rallypoint.rpc.autograd compared with torch.distributed.autograd; prints JSON.

    python bench/autograd.py --quick
    python bench/autograd.py --output bench/results/autograd.json

Like bench/rpc.py, whose groups it uses: both run at the same time and take turns block by block. Each figure comes with its lower
bounds: the same computation in one process, which is torch's own work, and the bare calls, without gradients.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from autograd_functions import PARAMETERS, Layers, double, forward, layers, nothing
from jobs import Progress, machine, publish, spread
from rpc import MIB, OURS, RIVALS, SAME_HOST, Duel, Found, Group, Rank, importable, name, row


MODULES = {
    OURS: ("rallypoint.rpc.autograd", "rallypoint.rpc.optim"),
    "tensorpipe": ("torch.distributed.autograd", "torch.distributed.optim"),
}
SIZES = {"16 B": 16, "1 MiB": MIB, "64 MiB": 64 * MIB}
WORKERS = 4
CHAIN, BACKWARD, STEP, EMPTY = "chain of 2 workers", "backward", "optimizer step", "empty context"
# Lower bounds for a chain and a step, more or less.
PLAIN, ALONE = "two plain calls, the same tensors", "alone, forward and backward"
PLAIN_STEP, ALONE_STEP = "four empty calls at once", "alone, the optimizers' own steps"


class AutogradRank(Rank):
    def __init__(self, rival: str, transport: str, rank: int) -> None:
        super().__init__(rival, transport, rank)
        autograd, optim = MODULES[rival]
        self._autograd = importlib.import_module(autograd)
        self._optim = importlib.import_module(optim)

    def chain(self, num_bytes: int, count: int, warm_up: int) -> list[tuple[float, float]]:
        """Seconds of a forward and backward pass through one other worker, and of the backward pass."""
        x = torch.ones(num_bytes // 4, requires_grad=True)
        found = []
        for _ in range(warm_up + count):
            began = time.perf_counter()
            with self._autograd.context() as context_id:
                loss = self._rpc.rpc_sync(name(1), double, (x,)).sum()
                between = time.perf_counter()
                self._autograd.backward(context_id, [loss])
                ended = time.perf_counter()
                if not bool((self._autograd.get_gradients(context_id)[x][:2] == 2).all()):
                    raise ValueError("the gradient is wrong")
            found.append((ended - began, ended - between))
        return found[warm_up:]

    def plain(self, num_bytes: int, count: int, warm_up: int) -> list[float]:
        """Seconds of two calls that take and return the tensor: what a chain passes, without gradients."""
        x = torch.ones(num_bytes // 4)
        found = []
        for _ in range(warm_up + count):
            began = time.perf_counter()
            for _ in range(2):
                self._rpc.rpc_sync(name(1), double, (x,)).sum()
            found.append(time.perf_counter() - began)
        return found[warm_up:]

    def alone(self, num_bytes: int, count: int, warm_up: int) -> list[float]:
        """Seconds of the chain's computation in this process."""
        x = torch.ones(num_bytes // 4, requires_grad=True)
        found = []
        for _ in range(warm_up + count):
            began = time.perf_counter()
            torch.autograd.grad(double(x).sum(), x)
            found.append(time.perf_counter() - began)
        return found[warm_up:]

    def step(self, count: int, warm_up: int) -> list[float]:
        """Seconds of each step of one optimizer over parameters on all workers."""
        remotes = [self._rpc.remote(name(at), layers) for at in range(WORKERS)]
        parameters = [each.remote().parameter(at) for each in remotes for at in range(PARAMETERS)]
        optimizer = self._optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.001)
        found = []
        with self._autograd.context() as context_id:
            x = torch.ones(1, layers().parameters[0].shape[0])
            futures = [self._rpc.rpc_async(name(at), forward, (x,)) for at in range(WORKERS)]
            loss = torch.stack([each.wait() for each in futures]).sum()
            self._autograd.backward(context_id, [loss])
            for _ in range(warm_up + count):
                began = time.perf_counter()
                optimizer.step(context_id)
                found.append(time.perf_counter() - began)
        return found[warm_up:]

    def plain_step(self, count: int, warm_up: int) -> list[float]:
        """Seconds of one empty call to each worker, all at the same time."""
        found = []
        for _ in range(warm_up + count):
            began = time.perf_counter()
            futures = [self._rpc.rpc_async(name(at), nothing) for at in range(WORKERS)]
            for each in futures:
                each.wait()
            found.append(time.perf_counter() - began)
        return found[warm_up:]

    def alone_step(self, count: int, warm_up: int) -> list[float]:
        """Seconds of the steps of all workers' optimizers in this process, one after the other."""
        optimizers = []
        for _ in range(WORKERS):
            made = Layers()
            made.forward(torch.ones(1, made.parameters[0].shape[0])).sum().backward()
            optimizers.append(torch.optim.SGD(made.parameters, lr=0.001))
        found = []
        for _ in range(warm_up + count):
            began = time.perf_counter()
            for each in optimizers:
                each.step()
            found.append(time.perf_counter() - began)
        return found[warm_up:]

    def context(self, count: int, warm_up: int) -> list[float]:
        found = []
        for _ in range(warm_up + count):
            began = time.perf_counter()
            with self._autograd.context():
                pass
            found.append(time.perf_counter() - began)
        return found[warm_up:]


def figure(scale: float) -> Callable[[Sequence[Sequence[float]]], dict[str, Any]]:
    return lambda blocks: spread([each * scale for block in blocks for each in block], 2)


def measure_chain(label: str, num_bytes: int, blocks: int, calls: int) -> Callable[..., Any]:
    def block(group: Group) -> list[tuple[float, float]]:
        return group.ask([0], "chain", num_bytes, calls, 2)[0]

    def run(duel: Duel) -> list[dict[str, Any]]:
        found = duel.turns(block, blocks)
        rows = [
            row(f"{what}, {label}", SAME_HOST, "us", _part(found, at), figure(1e6))
            for at, what in enumerate((f"{CHAIN}, forward and backward", f"{CHAIN}, {BACKWARD}"))
        ]
        # After the chains, so as not to affect their figures.
        for what, method in ((PLAIN, "plain"), (ALONE, "alone")):
            found = duel.turns(
                lambda group, method=method: group.ask([0], method, num_bytes, calls, 2)[0],
                max(1, blocks // 2),
            )
            rows.append(row(f"{what}, {label}", SAME_HOST, "us", found, figure(1e6)))
        return rows

    return run


def _part(found: Found, at: int) -> Found:
    return {
        rival: [[each[at] for each in block] for block in blocks]
        if isinstance(blocks, list)
        else blocks
        for rival, blocks in found.items()
    }


def measure_one(what: str, method: str, blocks: int, calls: int) -> Callable[..., Any]:
    def run(duel: Duel) -> list[dict[str, Any]]:
        found = duel.turns(lambda group: group.ask([0], method, calls, calls // 5)[0], blocks)
        return [row(what, SAME_HOST, "us", found, figure(1e6))]

    return run


def measure(quick: bool, only: str) -> list[dict[str, Any]]:
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module for module in RIVALS.values() if importable(module)])
    few = 2 if quick else 10
    calls = {16: 200, MIB: 50, 64 * MIB: 3}
    steps: list[tuple[int, str, Callable[..., Any]]] = [
        (2, label, measure_chain(label, size, few, max(1, calls[size] // (5 if quick else 1))))
        for label, size in SIZES.items()
    ]
    steps.append((2, EMPTY, measure_one(EMPTY, "context", few, 500)))
    some = 20 if quick else 100
    for what, method in ((STEP, "step"), (PLAIN_STEP, "plain_step"), (ALONE_STEP, "alone_step")):
        steps.append((WORKERS, what, measure_one(what, method, few, some)))
    steps = [each for each in steps if only in each[1]]
    rows: list[dict[str, Any]] = []
    progress = Progress(len(steps))
    duel, members = None, 0
    with closing(progress):
        try:
            for size, what, function in steps:
                progress.step(what)
                if size != members:
                    if duel is not None:
                        duel.close()
                    duel, members = Duel(context, SAME_HOST, size, AutogradRank), size
                rows += function(duel)
        finally:
            if duel is not None:
                duel.close()
    return rows


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {each["what"]: each for each in rows}
    whole = f"{CHAIN}, forward and backward"
    promises = [
        (f"{whole}, 16 B", "over_tensorpipe", 0.334),
        (f"{whole}, 1 MiB", "over_tensorpipe", 0.5),
        (f"{whole}, 64 MiB", "over_tensorpipe", 0.334),
        (STEP, "over_tensorpipe", 0.334),
        (EMPTY, "us", 20.0),
    ]
    found = []
    for what, unit, limit in promises:
        each = by_name.get(what, {})
        value = each.get(OURS, {}).get("median") if unit == "us" else each.get(unit)
        times = unit if unit == "us" else "times TensorPipe's"
        found.append(
            {
                "what": f"{what}: {times}, at most",
                "measured": value,
                "limit": limit,
                "holds": None if value is None else value <= limit,
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--only", default="", metavar="WORD", help="steps with this in their name")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "autograd", "quick": args.quick, "machine": machine()}
    began = time.monotonic()
    result["rows"] = measure(args.quick, args.only)
    result["took_s"] = round(time.monotonic() - began, 1)
    result["targets"] = targets(result["rows"])
    publish(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
