"""The training of recovery.py with torchft and with NVRx's in-process restart, whose survivors also keep their processes.

    pip install -c constraints.txt torchft-nightly nvidia-resiliency-ext

Both are used as their documentation shows, with their defaults, except where noted below. With torchft, each worker is a replica
with its own manager, and a lost one is started again. NVRx has no launcher in this mode, and continues with those that are left.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any


# The module that each needs.
MODULES = {"torchft": "torchft", "nvrx": "nvidia_resiliency_ext"}
# As in recovery.py: pid, steps it has completed, when it completed the last one. They report nothing about recoveries.
LINE = struct.Struct("=qqdd")
# Gloo's operations cannot be aborted, so NVRx waits until they time out: 30 minutes by default.
NVRX_TIMEOUT = timedelta(seconds=5)


def is_installed(kind: str) -> bool:
    return importlib.util.find_spec(MODULES[kind]) is not None


def command(kind: str, workers: int, width: int, setup: float) -> list[str]:
    return [sys.executable, __file__, kind, str(workers), str(width), str(setup)]


def run(kind: str, workers: int, width: str, setup: str) -> None:
    """Start the workers. Until there is a file named stop, start lost workers of torchft again."""
    folder, env = Path(os.environ["NOTES"]), dict(os.environ)
    if kind == "torchft":
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=1)
        port = re.sub(r".*:", "", lighthouse.address())
        env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(workers)}

    def start(index: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, __file__, kind, str(workers), width, setup, str(index)]
        return subprocess.Popen(words, env={**env, "RANK": str(index)})

    running = [start(index) for index in range(workers)]
    while not (folder / "stop").exists():
        for index, each in enumerate(running):
            if each.poll() is not None and kind == "torchft":
                running[index] = start(index)
        time.sleep(0.02)
    for each in running:
        each.kill()
        each.wait()
    os._exit(0)  # the lighthouse has threads


def work(kind: str, width: int, setup: float, index: int) -> None:
    import torch

    board = mmap.mmap(os.open(f"{os.environ['NOTES']}/board", os.O_RDWR), 0)
    time.sleep(setup)
    torch.manual_seed(0)
    net = torch.nn.Linear(width, width, bias=False)

    def note(step: int) -> None:
        LINE.pack_into(board, index * LINE.size, os.getpid(), step, time.monotonic(), 0.0)

    (with_torchft if kind == "torchft" else with_nvrx)(net, torch.ones(8, width), note)


def with_torchft(net: Any, x: Any, note: Callable[[int], None]) -> None:
    import torch
    import torch.distributed as dist
    import torchft

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inner = torch.optim.Adam(net.parameters())

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{os.environ['RANK']}_",
        hostname="127.0.0.1",
    )
    model = torchft.DistributedDataParallel(manager, net, gradient_as_bucket_view=True)
    optimizer, step = torchft.Optimizer(manager, inner), 0
    while True:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if manager.current_step() > step:  # otherwise it was not committed
            step = manager.current_step()
            note(step)


def with_nvrx(net: Any, x: Any, note: Callable[[int], None]) -> None:
    import torch
    import torch.distributed as dist
    from nvidia_resiliency_ext import inprocess
    from torch.nn.parallel import DistributedDataParallel

    optimizer, done = torch.optim.Adam(net.parameters()), [0]

    def train(call: Any = None) -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(f"{os.environ['NOTES']}/store-{call.iteration}", size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=NVRX_TIMEOUT
        )
        model = DistributedDataParallel(
            net, gradient_as_bucket_view=True
        )  # sends rank 0's parameters
        # The rest is left to the script: a rank may be a step behind.
        step = torch.tensor(done[0])
        dist.broadcast(step, 0)
        done[0] = int(step)
        for state in optimizer.state.values():
            for each in state.values():
                dist.broadcast(each, 0)
        while True:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            done[0] += 1
            note(done[0])

    # A string would not be recognized as the type.
    train.__annotations__["call"] = inprocess.CallWrapper
    inprocess.Wrapper()(train)()


def main() -> int:
    kind, workers, width, setup, *index = sys.argv[1:]
    if index:
        work(kind, int(width), float(setup), int(index[0]))
    else:
        run(kind, int(workers), width, setup)
    return 0


if __name__ == "__main__":
    sys.exit(main())
