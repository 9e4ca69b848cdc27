"""Whether a job that hangs says which rank is to blame, where it is, and how soon: twelve ways to hang; prints JSON.

    python bench/hang_drill.py --seeds 1
    python bench/hang_drill.py --output bench/results/hang_drill.json

Each job has two supervisors with four workers each. They train for some steps; then one rank, chosen by the seed, hangs. What
counts is that `rally run --hang-after` prints that rank, and no other, and the function in which it hangs. A rank that keeps a
core busy is reported three times as late, because long work looks the same.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Progress, machine, publish


WORKERS = 8
AFTER = 5.0
LONGER = 3
# Seconds beyond the limit.
PATIENCE = 15.0
STEPS = 10


# -- ways to hang, in one rank ---------------------------------------------------------------------


def stuck_read() -> None:
    read, _write = os.pipe()
    os.read(read, 1)


def taken_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def python_loop() -> None:
    while True:
        pass


def c_loop() -> None:
    sum(range(10**16))  # holds the GIL


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def deadlocked_threads() -> None:
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()


def stopped_loader() -> None:
    from torch.utils.data import DataLoader

    for _ in DataLoader(_Stops(), num_workers=1):  # type: ignore[arg-type]
        pass


class _Stops:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def in_the_kernel() -> None:
    libc = ctypes.PyDLL(None)
    if libc.vfork() == 0:  # the parent is in state D until the child exits or executes a program
        while True:
            libc.pause()


def rpc_that_waits() -> None:
    from rallypoint import rpc

    rank = int(os.environ["RANK"])
    rpc.rpc_sync(f"w{(rank + 1) % WORKERS}", _never, timeout=0)


def _never() -> None:
    threading.Event().wait()


def other_order() -> None:
    import torch
    import torch.distributed as dist

    dist.all_gather([torch.ones(1) for _ in range(WORKERS)], torch.ones(1))


def other_sizes() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1 << 20))


def missing_in_subgroup() -> None:
    """It goes to the next collective of all ranks instead."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    dist.all_reduce(torch.ones(1))


# Name -> the function, and what shows the place besides the function's name.
WAYS: dict[str, tuple[Callable[[], None], str]] = {
    "stuck read": (stuck_read, ""),
    "lock": (taken_lock, ""),
    "Python loop": (python_loop, ""),
    "C loop with the GIL": (c_loop, ""),
    "SIGSTOP": (stopped, "SIGSTOP"),
    "threads": (deadlocked_threads, ""),
    "DataLoader": (stopped_loader, ""),
    "state D": (in_the_kernel, "state D"),
    "rpc": (rpc_that_waits, ""),
    "other order": (other_order, ""),
    "other sizes": (other_sizes, ""),
    "subgroup": (missing_in_subgroup, ""),
}
BUSY = {"Python loop", "C loop with the GIL"}
# All ranks wait in collectives: none is missing, and the odd one is in the smallest group.
COLLECTIVES = {"other order", "other sizes", "subgroup"}


def work(way: str, odd: int, begun: str) -> None:
    """A worker."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if way == "rpc":
        from rallypoint import rpc

        rpc.init_rpc(f"w{rank}", rank=rank, world_size=WORKERS)
    members = sorted({odd, *((odd + each) % WORKERS for each in (1, 2, 3))})
    part = dist.new_group(members)
    for _ in range(STEPS):
        dist.all_reduce(torch.ones(1))
    if rank == odd:
        Path(begun).write_text(str(time.monotonic()))
        WAYS[way][0]()
    if way == "subgroup" and rank in members:
        dist.all_reduce(torch.ones(1), group=part)
    if way == "subgroup":
        dist.barrier()
    dist.all_reduce(torch.ones(1))
    time.sleep(1000)


# -- one job ---------------------------------------------------------------------------------------


def drill(way: str, odd: int, folder: Path) -> dict[str, Any]:
    """Run one job that hangs, and check what it reports."""
    events, begun = folder / "events.jsonl", folder / "begun"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "rallypoint", "run", "--nnodes", "2", "--nproc-per-node", "4"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--insecure"]
    words += ["--hang-after", str(AFTER), __file__, "--worker", way, str(odd), str(begun)]
    env = {**os.environ, "RALLY_EVENTS": str(events), "OMP_NUM_THREADS": "1"}
    files = [folder / f"node{node}" for node in range(2)]
    nodes = []
    for file in files:
        with file.open("wb") as output:
            nodes.append(
                subprocess.Popen(
                    words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            )
    limit = AFTER * (LONGER if way in BUSY else 1)
    try:
        told = _wait(lambda: _event(events, nodes), 60.0 + limit + PATIENCE)
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                node.terminate()
        for node in nodes:
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
        text = "\n".join(file.read_text(errors="replace") for file in files)
    return _verdict(way, odd, told, float(begun.read_text()) + limit, text)


def _verdict(
    way: str, odd: int, told: dict[str, Any] | None, limit: float, text: str
) -> dict[str, Any]:
    row: dict[str, Any] = {"way": way, "rank": odd, "told": told is not None}
    function, mark = WAYS[way][0].__name__, WAYS[way][1]
    if told is not None and told["kind"] == "job_hangs":
        blamed = list(told["missing"])
        if way in COLLECTIVES and not blamed:
            blamed = [odd] if f"\nrank {odd} (" in text.partition("\nranks ")[0] + "\n" else []
        row |= {
            "blamed": blamed,
            "named": blamed == [odd],
            "place": function in text or bool(mark and mark in text),
            "seconds_late": round(told["monotonic"] - limit, 2),
        }
    elif told is not None:
        # The job failed instead of hanging: its report has the place.
        row |= {"failed": True, "named": f"rank {odd} " in text, "place": function in text}
        row["seconds_late"] = round(told["monotonic"] - limit, 2)
    row["right"] = bool(row.get("named") and row.get("place") and row["seconds_late"] <= 5.0)
    return row


def _event(path: Path, nodes: list[subprocess.Popen[bytes]]) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            record: dict[str, Any] = json.loads(line)
            if record["kind"] in {"job_hangs", "job_ended"}:
                return record
    return None


def _wait(look: Callable[[], Any], seconds: float) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := look():
            return found
        time.sleep(0.05)
    return None


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3, help="jobs of each kind")
    parser.add_argument("--only", help="one way to hang", choices=list(WAYS))
    parser.add_argument("--output", type=Path, help="write the JSON there as well")
    given = parser.parse_args()
    ways = [given.only] if given.only else list(WAYS)
    rows = []
    progress = Progress(len(ways) * given.seeds)
    for seed in range(given.seeds):
        chosen = random.Random(seed)
        for way in ways:
            progress.step(way)
            with tempfile.TemporaryDirectory() as folder:
                rows.append(drill(way, chosen.randrange(WORKERS), Path(folder)))
    progress.close()
    late = [row["seconds_late"] for row in rows if row["told"]]
    result = {
        **machine(),
        "hang_after": AFTER,
        "right": sum(row["right"] for row in rows),
        "jobs": len(rows),
        "median_seconds_late": round(statistics.median(late), 2) if late else None,
        "rows": rows,
    }
    return publish(result, given.output)


if __name__ == "__main__":
    sys.exit(main())
