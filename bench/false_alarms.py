"""Whether a healthy job is reported to hang: hours of uneven steps, slow checkpoints and evaluations; prints JSON.

    python bench/false_alarms.py --minutes 10
    python bench/false_alarms.py --output bench/results/false_alarms.json

One job has two supervisors with four workers each, and the default `--hang-after` and `--slow-after`. Steps take from a tenth of
a second to three seconds, different on each rank, and now and then a batch arrives half a minute late. Every five minutes rank 0
writes a checkpoint, in pieces, for 90 seconds, then evaluates for 90 seconds, while the others wait in a barrier. Nothing hangs,
and no rank is slower than the others for long, so every alarm is false.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jobs import RALLY, Progress, machine, publish


WORKERS = 8
ROUND = 300.0  # seconds from one checkpoint to the next
ALONE = 90.0  # seconds that rank 0 writes a checkpoint, and that it evaluates
LATE_BATCH = 30.0  # seconds
ALARMS = {"job_hangs", "worker_slow"}


# -- a worker --------------------------------------------------------------------------------------


def work(seconds: float, notes: Path) -> None:
    """Train for that long. Rank 0 records how many steps, checkpoints and evaluations there were."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    chosen = random.Random(rank)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    count: Counter[str] = Counter()
    going = torch.ones(2)
    began = alone = time.monotonic()
    while going[0].item():
        late = chosen.random() < 0.001
        time.sleep(LATE_BATCH if late else chosen.choice((0.1, 0.3, 0.3, 0.5, 0.5, 1.0, 3.0)))
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        count["steps"] += 1
        now = time.monotonic()
        going = torch.tensor([now - began < seconds, now - alone < ROUND], dtype=torch.float32)
        dist.broadcast(going, 0)
        if not going[1].item():
            if rank == 0:
                _save(notes)
            dist.barrier()
            if rank == 0:
                _evaluate(model.module)
            dist.barrier()
            alone = time.monotonic()
            count.update(("checkpoints", "evaluations"))
        if rank == 0:
            (notes / "count").write_text(json.dumps(count))


def _save(notes: Path) -> None:
    """Save to slow storage: a piece each second."""
    began = time.monotonic()
    with (notes / "checkpoint").open("wb") as file:
        while time.monotonic() - began < ALONE:
            file.write(os.urandom(1 << 16))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(1)


def _evaluate(model: Any) -> None:
    """Evaluate, mostly waiting for data."""
    import torch

    began = time.monotonic()
    with torch.no_grad():
        while time.monotonic() - began < ALONE:
            for _ in range(100):
                model(torch.randn(256, 64))
            time.sleep(0.2)


# -- the job ---------------------------------------------------------------------------------------


def measure(seconds: float) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*RALLY, "--nnodes", "2", "--nproc-per-node", str(WORKERS // 2)]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--insecure"]
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        events = folder / "events.jsonl"
        words += [__file__, "--worker", str(seconds), base]
        env = {**os.environ, "RALLY_EVENTS": str(events), "OMP_NUM_THREADS": "1"}
        outputs = [folder / f"node{node}" for node in range(2)]
        nodes = []
        for output in outputs:
            with output.open("wb") as file:
                nodes.append(
                    subprocess.Popen(
                        words, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
                    )
                )
        progress = Progress(max(1, round(seconds / 60)))
        began = time.monotonic()
        while any(node.poll() is None for node in nodes):
            if time.monotonic() - began > seconds + 4 * ALONE + 60:
                break  # it really hangs
            progress.step("training")
            try:
                nodes[0].wait(60)
            except subprocess.TimeoutExpired:
                continue
            nodes[1].wait(60)
        progress.close()
        for node in nodes:
            if node.poll() is None:
                node.kill()
        codes = [node.wait() for node in nodes]
        records = [json.loads(line) for line in events.read_text().splitlines()]
        told = [record for record in records if record["kind"] in ALARMS]
        said = [
            line
            for output in outputs
            for line in output.read_text(errors="replace").splitlines()
            if line.startswith("rally: ")
        ]
        count = json.loads((folder / "count").read_text())
    return {"exit_codes": codes, **count, "alarms": told, "said": said}


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(float(sys.argv[2]), Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=120.0, help="of training")
    parser.add_argument("--output", type=Path, help="write the JSON there as well")
    given = parser.parse_args()
    result = {**machine(), "minutes": given.minutes, **measure(given.minutes * 60)}
    result["targets"] = [
        {
            "what": "no alarm, and the job ends well",
            "holds": not result["alarms"] and result["exit_codes"] == [0, 0],
        }
    ]
    return publish(result, given.output)


if __name__ == "__main__":
    sys.exit(main())
