"""A worker for tests of restarts: in each generation it notes what it sees, and all-reduces.

Notes are files ``KIND.GENERATION.RANK`` in the folder WORKER_NOTES.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path


gc.disable()  # collections are a third of the time that these imports take

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


gc.enable()

NOTES = Path(os.environ["WORKER_NOTES"])
RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["RALLY_GENERATION"])


def note(kind: str, value: object) -> None:
    path = NOTES / f"{kind}.{GENERATION}.{RANK}"
    new = path.with_name("new-" + path.name)
    new.write_text(json.dumps(value))
    new.rename(path)


def leave(code: int = 0) -> None:
    # Skip torch's destructors: they abort now and then while Gloo's threads run.
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dies", type=int, default=0, help="in so many generations, one worker")
    parser.add_argument("--rank-0-leaves", action="store_true")
    parser.add_argument("--waits", action="store_true", help="to be killed from outside")
    args = parser.parse_args()
    names = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    note("env", {name: os.environ[name] for name in names} | {"parent": os.getppid()})

    dist.init_process_group("gloo")
    total = torch.tensor([RANK + 1.0])
    dist.all_reduce(total)
    note("sum", total.item())

    if args.rank_0_leaves:
        use_store_without_rank_0()
        leave()
    if args.waits and GENERATION == 0:
        note("pid", os.getpid())
        while True:
            dist.all_reduce(total)
            time.sleep(0.002)
    if args.dies > GENERATION:
        dist.barrier()  # all have noted their sum
        if GENERATION % dist.get_world_size() == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            dist.all_reduce(total)
    print(f"rank {RANK} of generation {GENERATION} ended well")
    leave()


def use_store_without_rank_0() -> None:
    if RANK == 0:
        note("pid", os.getpid())
        leave()
    rank_0 = NOTES / f"pid.{GENERATION}.0"
    while not rank_0.exists() or Path("/proc", rank_0.read_text()).exists():
        time.sleep(0.01)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"late-{RANK}", str(RANK))
    others = range(1, dist.get_world_size())
    note("store", [int(store.get(f"late-{other}")) for other in others])


if __name__ == "__main__":
    main()
