"""From the command to the first all-reduce and the exit: `rally run --warm` against `rally run`, torchrun and `import torch`.

    python bench/warm.py [--quick] [--output FILE]

Each round runs all of them once, in turn, so that a busy machine slows all. The warm server is started beforehand, and stopped
at the end. The promise: with 8 workers, a warm job takes at most 0.35 of the time of `import torch` in a fresh interpreter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from jobs import RALLY, TORCHRUN, machine, publish, ratio, spread


SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(4)
dist.all_reduce(ones)
assert ones[0] == dist.get_world_size()
dist.destroy_process_group()
"""
PROMISE = 0.35


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    # A unique name, so that no other job uses this server.
    env = {**os.environ, "TORCH_BENCH": uuid.uuid4().hex}
    workers = ["--nproc-per-node", str(options.workers)]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        commands = {
            "warm": [*RALLY, "--warm", "--warm-timeout", "30", *workers, str(script)],
            "rally": [*RALLY, *workers, str(script)],
            "torchrun": [*TORCHRUN, "--standalone", *workers, str(script)],
            "import_torch": [sys.executable, "-c", "import torch"],
            "python": [sys.executable, "-c", ""],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        first = _seconds(commands["warm"], env)
        for _ in range(rounds):
            for name, command in commands.items():
                seconds[name].append(_seconds(command, env))
    figures = {name: spread(values) for name, values in seconds.items()}
    relative = ratio(figures["warm"], figures["import_torch"])
    result = {
        "machine": machine(),
        "workers": options.workers,
        "seconds": {"first_warm": round(first, 3), **figures},
        "warm_per_import_torch": relative,
        "targets": [
            {
                "what": f"warm / import torch <= {PROMISE}",
                "value": relative,
                "holds": None if options.quick or relative is None else relative <= PROMISE,
            }
        ],
    }
    return publish(result, options.output)


def _seconds(command: list[str], env: dict[str, str]) -> float:
    began = time.monotonic()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
