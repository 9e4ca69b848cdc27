"""Workers of a session are killed at random instants; the end must equal that of a run without a loss; prints JSON.

    python bench/soak_sessions.py --faults 50 --workers 8
    python bench/soak_sessions.py --output bench/results/soak_sessions.json
    python bench/soak_sessions.py --kind fsdp2 --workers 4
    python bench/soak_sessions.py --nodes 4 --output bench/results/soak_sessions_nodes.json

DistributedDataParallel or FSDP2, Adam, dropout, batch norm, one million parameters, data in random order. A fault is SIGKILL to
one worker, now and then to two at once, also during the recovery from the previous one, and during the set-up of the process
that takes over a rank. With several nodes, each has its own supervisor on this host. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs import RALLY, Progress, adopt_orphans, machine, publish, spread


# One line of the board for each rank: pid, steps it has completed, when it completed the last one.
LINE = struct.Struct("=qqd")
# Seconds without a step of some rank after which the job counts as hanging.
PATIENCE = 90.0

TRAIN = """
import hashlib, json, mmap, os, random, struct, sys, time
rank = int(os.environ["RANK"])
folder, steps, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
board = mmap.mmap(os.open(f"{folder}/board", os.O_RDWR), 0)
LINE = struct.Struct("=qqd")
LINE.pack_into(board, rank * LINE.size, os.getpid(), -1, 0.0)
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
dist.init_process_group("gloo")
names = [None] * dist.get_world_size()
dist.all_gather_object(names, rank)
assert names == list(range(dist.get_world_size()))
net = torch.nn.Sequential(
    torch.nn.Linear(64, 1000), torch.nn.BatchNorm1d(1000), torch.nn.ReLU(), torch.nn.Dropout(0.1),
    torch.nn.Linear(1000, 930), torch.nn.ReLU(), torch.nn.Linear(930, 4))
if kind == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    for part in (net[0], net[4], net):
        fully_shard(part)
else:
    net = DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters())
data = torch.utils.data.TensorDataset(torch.randn(400, 64), torch.randint(4, (400,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
torch.manual_seed(100 + rank)
random.seed(rank)
with elastic.session(net, optimizer) as session:
    for epoch in session.epochs(steps // 50):
        for x, y in session.batches(loader):
            with session.step():
                loss = torch.nn.functional.cross_entropy(net(x) * (1 + random.random()), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            LINE.pack_into(board, rank * LINE.size, os.getpid(), session.position, time.monotonic())
    bits = hashlib.sha256()
    tensors = [*net.parameters(), *net.buffers()]
    tensors += [state["exp_avg_sq"] for state in optimizer.state_dict()["state"].values()]
    for tensor in tensors:
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        bits.update(part.detach().contiguous().numpy().tobytes())
    end = [session.position, bits.hexdigest(), torch.rand(1).item(), random.random()]
with open(f"{folder}/end {rank}", "w") as file:
    json.dump(end, file)
dist.destroy_process_group()
"""


class Board:
    """What the workers report about themselves, in shared memory."""

    def __init__(self, folder: Path, workers: int) -> None:
        path = folder / "board"
        path.write_bytes(bytes(LINE.size * workers))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._workers = workers

    def lines(self) -> list[tuple[int, int, float]]:
        return [LINE.unpack_from(self._map, rank * LINE.size) for rank in range(self._workers)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50, help="how many times to kill (50)")
    parser.add_argument("--workers", type=int, default=8, help="how many workers (8)")
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes they are on (1)")
    parser.add_argument(
        "--kind", choices=("ddp", "fsdp2"), default="ddp", help="of the model (ddp)"
    )
    parser.add_argument("--seed", type=int, default=7, help="of the instants and victims (7)")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    adopt_orphans()
    steps = max(100, options.faults * 20) // 50 * 50
    progress = Progress(options.faults + 1)
    progress.step("a run without a loss")
    calm, _ = run(options, steps, 0, progress)
    ends, found = run(options, steps, options.faults, progress)
    equal = [one == other for one, other in zip(calm["ends"], ends["ends"], strict=True)]
    right = ends["code"] == 0 and all(equal) and ends["ends"][0] is not None
    result = {
        "benchmark": "soak_sessions",
        "machine": machine(),
        "kind": options.kind,
        "workers": options.workers,
        "nodes": options.nodes,
        "seed": options.seed,
        "steps": steps,
        "faults": found["faults"],
        "killed": found["killed"],
        "survivors_kept_their_process": found["kept"],
        "seconds_to_the_next_step_of_all": spread(found["seconds"]),
        "seconds_without_a_loss": calm["seconds"],
        "seconds": ends["seconds"],
        "code": ends["code"],
        "ranks_with_an_equal_end": sum(equal),
        "processes_left": found["left"],
        "said": ends["said"],
        "targets": [
            {"what": "every rank ends bit by bit as without a loss", "holds": right},
            {"what": "no survivor's process changes", "holds": found["kept"]},
            {"what": "no process is left", "holds": not found["left"]},
        ],
    }
    return 1 if publish(result, options.output) else 0


def run(
    options: argparse.Namespace, steps: int, faults: int, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="rally-soak-"))
    try:
        return run_in(folder, options, steps, faults, progress)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_in(
    folder: Path, options: argparse.Namespace, steps: int, faults: int, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    (folder / "train.py").write_text(TRAIN)
    board = Board(folder, options.workers)
    begun = time.monotonic()
    with (folder / "said").open("w") as said:
        jobs = [
            subprocess.Popen(
                [
                    *(*RALLY, *words, "--max-losses", "100000", "--preload", "torch._dynamo"),
                    *(str(folder / "train.py"), str(folder), str(steps), options.kind),
                ],
                cwd=folder,
                stdout=said,
                stderr=said,
            )
            for words in nodes(options)
        ]
    found = torment(jobs[0], board, options, faults, progress) if faults else {}
    code = 0
    for job in jobs:
        try:
            code = job.wait(PATIENCE + steps) or code
        except subprocess.TimeoutExpired:
            job.kill()
            code = -1
    ends = [folder / f"end {rank}" for rank in range(options.workers)]
    report = {
        "code": code,
        "seconds": round(time.monotonic() - begun, 1),
        "ends": [json.loads(each.read_text()) if each.exists() else None for each in ends],
        "said": (folder / "said").read_text().splitlines()[-20:] if code else [],
    }
    found["left"] = [pid for pid, *_ in board.lines() if pid and Path(f"/proc/{pid}").exists()]
    return report, found


def nodes(options: argparse.Namespace) -> list[list[str]]:
    """For each node, the flags that say how many workers there are, and where."""
    if options.nodes == 1:
        return [["--nproc-per-node", str(options.workers)]]
    each, rest = divmod(options.workers, options.nodes)
    if rest or not each:
        raise SystemExit(
            f"--workers {options.workers} cannot be shared out to {options.nodes} nodes"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        [
            *("--nnodes", str(options.nodes), "--node-rank", str(rank), "--insecure"),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("--nproc-per-node", str(each)),
        ]
        for rank in range(options.nodes)
    ]


def torment(
    job: subprocess.Popen[bytes],
    board: Board,
    options: argparse.Namespace,
    faults: int,
    progress: Progress,
) -> dict[str, Any]:
    chance = random.Random(options.seed)
    seconds: list[float] = []
    killed: list[int] = []
    kept, done = True, 0
    while any(steps < 1 for _, steps, _ in board.lines()) and job.poll() is None:
        time.sleep(0.01)  # a bench may poll what it measures
    while done < faults and job.poll() is None:
        done += 1
        progress.step(f"fault {done}")
        time.sleep(chance.uniform(0.0, 0.4))
        before = board.lines()
        victims = chance.sample(range(options.workers), 2 if chance.random() < 0.1 else 1)
        at = time.monotonic()
        for rank in victims:
            try:
                os.kill(before[rank][0], signal.SIGKILL)
            except ProcessLookupError:
                continue  # it is being replaced
            killed.append(rank)
        if chance.random() < 0.3:
            continue  # the next fault strikes during this recovery
        while job.poll() is None:
            now = board.lines()
            if all(last > at for _, _, last in now):
                seconds.append(max(last for _, _, last in now) - at)
                survivors = [rank for rank in range(options.workers) if rank not in victims]
                pids = [(before[rank][0], now[rank][0]) for rank in survivors]
                # A survivor of this fault may have been the previous one's victim, whose replacement appears only now.
                kept = kept and all(
                    old == new or not Path(f"/proc/{old}").exists() for old, new in pids
                )
                break
            if time.monotonic() - at > PATIENCE:
                job.terminate()
                return {"faults": done, "killed": killed, "seconds": seconds, "kept": False}
            time.sleep(0.002)
    return {"faults": done, "killed": killed, "seconds": seconds, "kept": kept}


if __name__ == "__main__":
    sys.exit(main())
