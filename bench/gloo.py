"""Collectives over Gloo in workers of `rally run` and of torchrun, on the same script; prints JSON.

    python bench/gloo.py --output bench/results/gloo.json
    python bench/gloo.py --quick

All-reduces of three sizes, and steps of DistributedDataParallel on a small model, by 2, 4 and 8 ranks on this machine. Jobs of the two
launchers alternate. What differs is how the threads of Gloo are scheduled (`rallypoint._core.scheduling`). JSON goes to stdout
(and --output), progress to stderr.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs import RALLY, TORCHRUN, Progress, machine, publish, ratio, spread


# Elements of float32, and how often they are reduced.
SIZES = {"all_reduce of 4 B": (1, 1500), "of 1 MiB": (1 << 18, 100), "of 100 MiB": (25 << 20, 6)}
STEP, STEPS = "step of DDP", 300
GIVE_UP = 300.0


def measure(folder: Path) -> None:
    """A worker. Rank 0 writes the seconds per call."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, (size, times) in SIZES.items():
        x = torch.ones(size)
        for _ in range(3):
            dist.all_reduce(x)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(x)
        dist.barrier()
        found[name] = (time.perf_counter() - began) / times
    net = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(3))
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, 64)
    for step in range(STEPS + 10):
        if step == 10:
            dist.barrier()
            began = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    found[STEP] = (time.perf_counter() - began) / STEPS
    if dist.get_rank() == 0:
        (folder / "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(launcher: list[str], ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as made:
        words = [*launcher, "--nproc-per-node", str(ranks), __file__, "--worker", made]
        subprocess.run(words, check=True, timeout=GIVE_UP, stdout=sys.stderr)
        found: dict[str, float] = json.loads((Path(made) / "found").read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each launcher (default 5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--quick", action="store_true", help="one round of two ranks")
    parser.add_argument("--output", type=Path, help="write the JSON here, too")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        measure(arguments.worker)
        return 0
    if arguments.quick:
        arguments.rounds, arguments.ranks = 1, [2]

    result: dict[str, Any] = {"machine": machine(), "microseconds": {}, "targets": []}
    progress = Progress(2 * arguments.rounds * len(arguments.ranks))
    for ranks in arguments.ranks:
        jobs: dict[str, list[dict[str, float]]] = {"rally": [], "torchrun": []}
        for number in range(arguments.rounds):
            for name, launcher in (("rally", RALLY), ("torchrun", TORCHRUN)):
                progress.step(f"{ranks} ranks, {name}, job {number + 1}")
                jobs[name].append(run(launcher, ranks))
        rows: dict[str, Any] = {}
        for what in (*SIZES, STEP):
            ours, theirs = (spread([1e6 * each[what] for each in jobs[name]], 1) for name in jobs)
            rows[what] = {"rally": ours, "torchrun": theirs, "ratio": ratio(ours, theirs)}
            result["targets"].append(
                {
                    "what": f"{ranks} ranks, {what}: not slower than under torchrun",
                    "holds": (ratio(ours, theirs) or 0.0) <= 1.05,
                }
            )
        result["microseconds"][f"{ranks} ranks"] = rows
    progress.close()
    return publish(result, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
