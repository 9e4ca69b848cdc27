"""Several supervisors on one host: how soon their workers meet, and a supervisor's memory, compared with torchrun; prints JSON.

    python bench/nodes.py --quick
    python bench/nodes.py --output bench/results/nodes.json
    python bench/nodes.py --before ../other-checkout/.venv/bin/rally   # another version of rally in turn with this one

Each of the nodes is started by the same command line, with one worker, and meets the others at a store that one of them serves.
See bench/README.md.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from jobs import RALLY, TORCHRUN, Progress, adopt_orphans, job, machine, publish, ratio, spread


WORKER = """
import os, sys, time
import torch, torch.distributed as dist

notes, rank = os.environ["NOTES"], os.environ["RANK"]
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
with open(f"{notes}/first.{rank}.new", "w") as file:
    file.write(str(time.monotonic()))
os.rename(f"{notes}/first.{rank}.new", f"{notes}/first.{rank}")
while sys.argv[1] == "hold" and not os.path.exists(notes + "/go"):
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""
TIMEOUT = 120.0
# The most memory that a supervisor may take, and the largest share of the earlier version's time.
MOST_MIB, MOST_OF_BEFORE = 30.0, 0.65


class Nodes:
    """Measures jobs of ``count`` nodes."""

    def __init__(self, folder: Path, count: int, launchers: dict[str, list[str]]) -> None:
        self.folder, self.count, self.launchers = folder, count, launchers
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self._jobs = 0

    def run(self, launcher: str, mode: str) -> dict[str, float] | None:
        """Seconds to the last worker's first all-reduce and to the last exit; with `hold`, a supervisor's MiB."""
        self._jobs += 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        where = ["--nnodes", str(self.count), "--nproc-per-node", "1"]
        where += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "bench"]
        notes = self.folder / str(self._jobs)
        notes.mkdir()
        with ExitStack() as stack:
            nodes = [
                stack.enter_context(
                    job(
                        [*self.launchers[launcher], *where, str(self.script), mode],
                        notes / f"node{index}",
                        NOTES=str(notes),
                    )
                )
                for index in range(self.count)
            ]
            found = {}
            if mode == "hold":
                wait_until(lambda: len(list(notes.glob("first.*[0-9]"))) == self.count)
                sizes = [psutil.Process(each.popen.pid).memory_info().rss for each in nodes]
                found["mib"] = max(sizes) / 2**20
                (notes / "go").touch()
            codes = [each.wait(TIMEOUT) for each in nodes]
            found["exit"] = time.monotonic() - nodes[0].began
            met = [float(each.read_text()) for each in notes.glob("first.*[0-9]")]
            if codes != [0] * self.count or len(met) != self.count:
                return None
            return found | {"first": max(met) - nodes[0].began}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def measure(
    folder: Path, count: int, repeats: int, launchers: dict[str, list[str]]
) -> list[dict[str, Any]]:
    nodes = Nodes(folder, count, launchers)
    progress = Progress((repeats + 2) * len(launchers))
    runs: dict[str, list[dict[str, float]]] = {each: [] for each in launchers}
    failed = dict.fromkeys(launchers, 0)
    sizes: dict[str, float | None] = {}
    for each in launchers:
        progress.step(f"{each}: warm-up")
        nodes.run(each, "end")
    for number in range(repeats):
        for each in launchers:
            progress.step(f"{each} ({number + 1})")
            found = nodes.run(each, "end")
            if found is None:
                failed[each] += 1
            else:
                runs[each].append(found)
    for each in launchers:
        progress.step(f"{each}: memory")
        held = nodes.run(each, "hold")
        sizes[each] = None if held is None else round(held["mib"], 1)
    progress.close()
    return [
        {
            "launcher": each,
            "nodes": count,
            "failed": failed[each],
            "to_first_all_reduce_s": spread([run["first"] for run in runs[each]]),
            "to_exit_s": spread([run["exit"] for run in runs[each]]),
            "supervisor_mib": sizes[each],
        }
        for each in launchers
    ]


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    of = {row["launcher"]: row for row in rows}
    found: list[tuple[str, Any, float]] = [
        ("a supervisor's memory, MiB", of["rally"]["supervisor_mib"], MOST_MIB)
    ]
    if "before" in of:
        first = "to_first_all_reduce_s"
        times = ratio(of["rally"][first], of["before"][first])
        found.append(("to the first all-reduce, times the version before", times, MOST_OF_BEFORE))
    return [
        {"what": what, "measured": value, "limit": limit, "holds": value and value <= limit}
        for what, value, limit in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    parser.add_argument("--quick", action="store_true", help="does it work at all")
    parser.add_argument("--nodes", type=int, default=3, help="how many (default 3)")
    parser.add_argument("--before", type=Path, help="the `rally` of another version, in turn")
    args = parser.parse_args()
    adopt_orphans()
    launchers = {"rally": RALLY, "torchrun": TORCHRUN}
    if args.before is not None:
        launchers["before"] = [str(args.before), "run"]
    version = subprocess.run(
        [sys.executable, "-c", "import rallypoint; print(rallypoint.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="rally-bench-") as folder:
        rows = measure(Path(folder), args.nodes, 2 if args.quick else 9, launchers)
    result = {
        "benchmark": "nodes",
        "quick": args.quick,
        "version": version,
        "machine": machine(),
        "rows": rows,
        "targets": targets(rows),
    }
    return publish(result, args.output)


if __name__ == "__main__":
    sys.exit(main())
