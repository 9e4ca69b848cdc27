"""The cost of protecting TCP: calls of rallypoint.rpc without protection, with a MAC (the default), with TLS; prints JSON.

    python bench/rpc_protection.py --quick
    python bench/rpc_protection.py --output bench/results/rpc_protection.json

All groups run at the same time and take turns block by block. The inactive ones are stopped (SIGSTOP).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from jobs import Progress, machine, publish, ratio, spread
from rpc import MIB, ONE_WAY, OURS, PROTECTIONS, Group, flat, new_meeting


SIZES = [16 * MIB, 64 * MIB]
MOST_TIMES_AN_EMPTY_CALL, LEAST_PART_OF_64_MIB = 1.5, 0.6


def measure(blocks: int, calls: int, repeats: int) -> list[dict[str, Any]]:
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rallypoint.rpc"])
    groups: dict[str, Group] = {}
    empty: dict[str, list[list[float]]] = {each: [] for each in PROTECTIONS}
    tensors: dict[tuple[str, int], list[list[float]]] = {
        (each, size): [] for each in PROTECTIONS for size in SIZES
    }
    progress = Progress(blocks)
    try:
        for name in PROTECTIONS:
            groups[name] = Group(context, OURS, name, 2)
            groups[name].init(new_meeting())
            groups[name].pause()
        for _ in range(blocks):
            progress.step("a block of each")
            for name, group in groups.items():
                group.resume()
                empty[name] += group.ask([0], "empty", calls, calls // 5)
                for size in SIZES:
                    tensors[name, size] += group.ask([0], "tensor", size, ONE_WAY, repeats, 1)
                group.pause()
    finally:
        progress.close()
        for group in groups.values():
            group.close()
    plain = next(iter(PROTECTIONS))
    rows = []
    first = spread([1e6 * each for each in flat(empty[plain])], 1)
    for name in PROTECTIONS:
        figure = spread([1e6 * each for each in flat(empty[name])], 1)
        rows.append(
            {"what": "empty call", "protection": name, "unit": "us", **figure}
            | {"over_plain": ratio(figure, first)}
        )
    for size in SIZES:
        speed = spread([size / each / 1e9 for each in flat(tensors[plain, size])], 3)
        for name in PROTECTIONS:
            figure = spread([size / each / 1e9 for each in flat(tensors[name, size])], 3)
            rows.append(
                {"what": f"{size // MIB} MiB one way", "protection": name, "unit": "GB/s"}
                | figure
                | {"over_plain": ratio(figure, speed)}
            )
    return rows


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    of = {(each["what"], each["protection"]): each["over_plain"] for each in rows}
    default = list(PROTECTIONS)[1]
    empty, large = of["empty call", default], of["64 MiB one way", default]
    return [
        {
            "what": f"an empty call takes at most {MOST_TIMES_AN_EMPTY_CALL} times as long",
            "holds": empty <= MOST_TIMES_AN_EMPTY_CALL,
        },
        {
            "what": f"64 MiB go at {LEAST_PART_OF_64_MIB:.0%} of the speed at least",
            "holds": large >= LEAST_PART_OF_64_MIB,
        },
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help="a quick check")
    args = parser.parse_args()
    began = time.monotonic()
    rows = measure(2, 50, 2) if args.quick else measure(20, 500, 5)
    result = {
        "benchmark": "rpc_protection",
        "quick": args.quick,
        "machine": machine(),
        "rows": rows,
        "took_s": round(time.monotonic() - began, 1),
        "targets": targets(rows),
    }
    publish(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
