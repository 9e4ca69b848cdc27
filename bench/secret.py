"""What the job's secret costs: launching eight workers, and calls over Unix sockets, with and without it; prints JSON.

    python bench/secret.py --quick
    python bench/secret.py --output bench/results/secret.json

A launch is `rally run` with an elastic job of one node (so --insecure has an effect) until it exits. Two kinds are measured:
`true` as a program, because importing torch would take most of the time and cause nearly all of the noise, and an empty script.
The calls are empty ones between two processes: in groups with a secret, and in groups that rely on their user's key. The
two sides of each comparison take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs import RALLY, Progress, machine, publish, ratio, spread
from rpc import OURS, OVER_UNIX, Group, flat, new_meeting


WORKERS = 8
MOST_MS, MOST_TIMES = 10.0, 1.02


def launches(count: int, progress: Progress, *, program: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="rally-secret-") as name:
        folder = Path(name)
        (folder / "empty.py").write_text("")
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text(secrets.token_hex(32))
        sides = {"insecure": ["--insecure"], "secret": ["--secret-file", str(folder / "secret")]}
        wall: dict[str, list[float]] = {side: [] for side in sides}
        cpu: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(count + 1):
            progress.step("a launch of each")
            for side in list(sides) if turn % 2 else reversed(list(sides)):
                port = new_meeting().rpartition(":")[2]
                words = ["--nnodes", "1:2", "--rdzv-endpoint", f"localhost:{port}"]
                words += ["--rdzv-conf", "last_call_timeout=0.01", "--nproc-per-node", str(WORKERS)]
                before, began = os.times(), time.monotonic()
                words += ["--no-python", "true"] if program else [str(folder / "empty.py")]
                command = [*RALLY, *sides[side], *words]
                subprocess.run(command, check=True, capture_output=True, timeout=120)
                after, ended = os.times(), time.monotonic()
                if turn:  # the first ones warm up
                    wall[side].append(1000 * (ended - began))
                    used = after.children_user + after.children_system
                    cpu[side].append(1000 * (used - before.children_user - before.children_system))
    rows = []
    for what, found in (("wall time", wall), ("processor time", cpu)):
        figures = {side: spread(times, 1) for side, times in found.items()}
        more = round(figures["secret"]["median"] - figures["insecure"]["median"], 1)
        rows.append(
            {
                "what": f"launch of {WORKERS} {'programs' if program else 'scripts'}, {what}",
                "unit": "ms",
                **figures,
                "more": more,
            }
        )
    return rows


def calls(pairs: int, count: int, progress: Progress) -> dict[str, Any]:
    """Measure calls, in many new pairs of groups: processes differ by a few per cent for as long as they live."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rallypoint.rpc"])
    medians: dict[str, list[float]] = {each: [] for each in OVER_UNIX}
    for pair in range(pairs):
        progress.step("a pair of groups")
        for name in list(OVER_UNIX) if pair % 2 else reversed(list(OVER_UNIX)):
            group = Group(context, OURS, name, 2)
            try:
                group.init(new_meeting())
                found = flat(group.ask([0], "empty", count, count // 5))
                medians[name].append(1e6 * statistics.median(found))
                group.shutdown()
            finally:
                group.close()
    without, with_secret = (spread(medians[name], 2) for name in OVER_UNIX)
    return {
        "what": "empty call over Unix sockets, medians of groups",
        "unit": "us",
        "insecure": without,
        "secret": with_secret,
        "times": ratio(with_secret, without),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help="a quick check")
    args = parser.parse_args()
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR")
    num_launches, pairs = (1, 2) if args.quick else (15, 120)
    progress = Progress(5 * num_launches + 2 + pairs)
    began = time.monotonic()
    try:
        call = calls(pairs, 100 if args.quick else 2000, progress)
        launch = launches(4 * num_launches, progress, program=True)
        launch += launches(num_launches, progress, program=False)
    finally:
        progress.close()
    result = {
        "benchmark": "secret",
        "quick": args.quick,
        "machine": machine(),
        "rows": [*launch, call],
        "took_s": round(time.monotonic() - began, 1),
        "targets": [
            {
                "what": f"a launch takes at most {MOST_MS:g} ms more, by the medians",
                "holds": launch[0]["more"] <= MOST_MS,
            },
            {
                "what": f"an empty call takes at most {MOST_TIMES} times as long",
                "holds": call["times"] <= MOST_TIMES,
            },
        ],
    }
    publish(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
