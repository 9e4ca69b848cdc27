"""Millions of small calls and thousands of tensors between two processes: does their memory grow? Prints JSON.

    python bench/memory_rpc.py --quick
    python bench/memory_rpc.py --output bench/results/memory_rpc.json

One process calls the other; a third one only samples the memory of both. Small calls are made in windows of futures, so
that five million take a few minutes. Tensors have sizes between 4 KiB and 4 MiB, spread evenly on a logarithmic scale; each
makes a round trip and is compared. Memory counts as flat if the median of the samples in the last tenth of a phase is at
most 5 % above that of the tenth after its warm-up. Otherwise the exit code is 1. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jobs import Progress, machine, publish

from rallypoint import rpc


CALLS = 5_000_000
TENSORS = 20_000
WINDOW = 1000
TENSOR_WINDOW = 8
SMALLEST, LARGEST = 4 << 10, 4 << 20
SAMPLE_EVERY = 0.1
# The warm-up's share of a phase's samples. By its end every kind of memory has been requested as much as it ever will be.
WARM_UP = 0.3
MOST_GROWTH = 0.05
KINDS = ("RssAnon", "RssShmem", "VmRSS")


def add(a: int, b: int) -> int:
    return a + b


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def small_calls(count: int, told: Any) -> None:
    """Make calls in windows: while one is answered, the next is on its way."""
    windows: deque[tuple[int, list[Any]]] = deque()
    made = 0
    while made < count or windows:
        if made < count:
            number = min(WINDOW, count - made)
            windows.append((made, [rpc.rpc_async("b", add, (i, 1)) for i in range(number)]))
            made += number
        if len(windows) > 1 or made >= count:
            begin, futures = windows.popleft()
            for i, future in enumerate(futures):
                if future.wait() != i + 1:
                    raise AssertionError(f"call {begin + i} has a wrong answer")
            told(begin + len(futures))


def tensors(count: int, told: Any) -> None:
    chance = random.Random(1)
    source = torch.randint(0, 256, (2 * LARGEST,), dtype=torch.uint8)
    windows: deque[tuple[int, int, Any]] = deque()
    for number in range(count + TENSOR_WINDOW):
        if number < count:
            size = int(SMALLEST * (LARGEST / SMALLEST) ** chance.random())
            offset = chance.randrange(source.numel() - size)
            tensor = source[offset : offset + size].clone()
            windows.append((offset, size, rpc.rpc_async("b", echo, (tensor,))))
        if number >= TENSOR_WINDOW:
            offset, size, future = windows.popleft()
            if not torch.equal(future.wait(), source[offset : offset + size]):
                raise AssertionError(f"tensor {number - TENSOR_WINDOW} came back changed")
            told(number + 1 - TENSOR_WINDOW)


PHASES = {"small calls": small_calls, "tensors": tensors}


def work(rank: int, meeting: str, transport: str, plan: dict[str, int], line: Connection) -> None:
    """A process of the group. The first one makes the calls and reports how far it is."""
    torch.set_num_threads(1)
    options = rpc.NativeRpcBackendOptions(
        init_method=f"file://{meeting}", transports=(transport,), bind="127.0.0.1"
    )
    rpc.init_rpc("ab"[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for phase, count in plan.items():
            line.send({"phase": phase})
            began = time.monotonic()
            step = max(1, count // 20)
            due = step

            def told(done: int, phase: str = phase, step: int = step) -> None:
                nonlocal due
                if done >= due:
                    due += step
                    line.send({"done": f"{done} {phase}"})

            PHASES[phase](count, told)
            line.send({"seconds": time.monotonic() - began})
        line.send({"end": True, "statistics": rpc.statistics()["peers"]})
    rpc.shutdown()
    line.close()


def memory(pid: int) -> dict[str, int]:
    """Resident bytes by kind."""
    found = {}
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = text.partition(":")
        if name in KINDS:
            found[name] = int(value.split()[0]) << 10
    return found


class Sampler:
    """Samples two processes until told to stop."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self.samples: list[list[dict[str, int]]] = [[], []]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY):
            for each, pid in zip(self.samples, self._pids, strict=True):
                each.append(memory(pid))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def verdict(samples: list[dict[str, int]]) -> dict[str, Any]:
    """How one process's memory has grown in one phase."""
    tenth = max(1, len(samples) // 10)
    first = int(len(samples) * WARM_UP)
    found: dict[str, Any] = {"samples": len(samples)}
    for kind in KINDS:
        values = [each[kind] for each in samples]
        if not values:
            continue
        after, last = median(values[first : first + tenth]), median(values[-tenth:])
        found[kind] = {
            "after_warm_up_mib": round(after / 2**20, 1),
            "at_the_end_mib": round(last / 2**20, 1),
            "largest_after_warm_up_mib": round(max(values[first:]) / 2**20, 1),
            "growth": round(last / after - 1, 4) if after else 0.0,
        }
    return found


def measure(transport: str, plan: dict[str, int], progress: Progress) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        processes = [
            context.Process(
                target=work, args=(rank, f"{folder}/meeting", transport, plan, pipes[rank][1])
            )
            for rank in range(2)
        ]
        for each in processes:
            each.start()
        for _, theirs in pipes:
            theirs.close()
        line = pipes[0][0]
        sampler: Sampler | None = None
        phase = ""
        try:
            while True:
                if not line.poll(120):
                    raise SystemExit(f"nothing happens in {phase!r}")
                said = line.recv()
                match said:
                    case {"phase": phase}:
                        sampler = Sampler([int(each.pid or 0) for each in processes])
                    case {"done": done}:
                        progress.step(f"{transport}: {done}")
                    case {"seconds": seconds}:
                        assert sampler is not None
                        sampler.stop()
                        result[phase] = {
                            "count": plan[phase],
                            "seconds": round(seconds, 1),
                            "per_second": round(plan[phase] / seconds),
                            "caller": verdict(sampler.samples[0]),
                            "callee": verdict(sampler.samples[1]),
                        }
                        sampler = None
                    case {"end": True}:
                        result["connections"] = said["statistics"]
                        break
            for each in processes:
                each.join(30)
        finally:
            if sampler is not None:
                sampler.stop()
            for each in processes:
                if each.is_alive():
                    each.kill()
                each.join()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument(
        "--quick", action="store_true", help="a fiftieth of the calls and tensors, as a quick check"
    )
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--transport", choices=("uds", "tcp"), default="uds")
    args = parser.parse_args()
    share = 50 if args.quick else 1
    plan = {"small calls": args.calls // share, "tensors": args.tensors // share}
    progress = Progress(20 * len(plan))
    result = measure(args.transport, plan, progress)
    progress.close()
    targets = [
        {
            "what": f"{phase}: the {side}'s memory grows by at most {MOST_GROWTH:.0%} after its warm-up",
            "measured": result[phase][side]["VmRSS"]["growth"],
            "holds": result[phase][side]["VmRSS"]["growth"] <= MOST_GROWTH,
        }
        for phase in plan
        for side in ("caller", "callee")
    ]
    document = {
        "benchmark": "memory_rpc",
        "machine": machine(),
        "transport": args.transport,
        **json.loads(json.dumps(result)),
        "targets": targets,
    }
    return 1 if publish(document, args.output) else 0


if __name__ == "__main__":
    sys.exit(main())
