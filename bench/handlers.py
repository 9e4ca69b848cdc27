"""Hundreds of handlers, made as programs make them, eight per process: how soon all have met; prints JSON.

    python bench/handlers.py --quick
    python bench/handlers.py --output bench/results/handlers.json

Each node is a handler from the public registry (``rendezvous_handler_registry.create_handler``), in its own thread. One
of them serves the store. With a secret, every record carries a MAC. The clock starts for all nodes at once, and stops when
the last one has its rank; making the handlers is included. One machine does the work of all nodes. The processes share one
import of torch. Whatever they print to stderr is counted: there must be nothing.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jobs import Progress, machine, publish, spread

from rallypoint.rendezvous import RendezvousParameters, rendezvous_handler_registry


PER_PROCESS = 8
MOST_SECONDS = {256: 1.0, 512: 2.0}
LIMIT = 120.0
# A program on its own machine pays for these imports once. Here the processes share them.
PRELOADED = [
    "torch.distributed",
    "rallypoint.rendezvous.backends.native_store",
    "rallypoint.rendezvous.backends.tcp_home",
    "rallypoint.rendezvous.c10d",
    "rallypoint.rendezvous.create",
    "rallypoint.rendezvous.dynamic",
]
processes = multiprocessing.get_context("forkserver")


def handlers(
    pipe: Connection, numbers: range, nodes: int, endpoint: str, secret: str, log: str
) -> None:
    """A process of the benchmark: makes its handlers when told to, and joins with them."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    # Collecting garbage among torch's objects would copy the pages that are shared with the parent.
    gc.collect()
    gc.freeze()
    start, done = threading.Event(), [0.0] * len(numbers)
    found: list[tuple[int, str]] = []

    def node(place: int, number: int) -> None:
        parameters = RendezvousParameters(
            "tcp", endpoint, "bench", nodes, nodes, local_addr="127.0.0.1",
            is_host=number == 0, join_timeout=LIMIT, **({"secret": secret} if secret else {}),
        )  # fmt: skip
        start.wait()
        try:
            handler = rendezvous_handler_registry.create_handler(parameters)
            rank = handler.next_rendezvous().rank
            done[place] = time.monotonic()
            found.append((rank, ""))
        except Exception as error:
            found.append((-1, f"{type(error).__name__}: {str(error)[:300]}"))

    threads = [threading.Thread(target=node, args=each, daemon=True) for each in enumerate(numbers)]
    for thread in threads:
        thread.start()
    pipe.send("ready")
    pipe.recv()
    start.set()
    for thread in threads:
        thread.join(LIMIT + 10.0)
    pipe.send((done, found))
    pipe.recv()  # all leave together: one of them has the store
    os._exit(0)


def round_of(nodes: int, with_secret: bool, folder: Path) -> dict[str, Any]:
    log = str(folder / uuid.uuid4().hex)
    secret = secrets.token_hex(32) if with_secret else ""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    members = []
    for first in range(0, nodes, PER_PROCESS):
        ours, theirs = processes.Pipe()
        numbers = range(first, min(first + PER_PROCESS, nodes))
        process = processes.Process(
            target=handlers, args=(theirs, numbers, nodes, endpoint, secret, log), daemon=True
        )
        process.start()
        theirs.close()
        members.append((process, ours))
    try:
        for _, pipe in members:
            pipe.recv()
        time.sleep(0.5)  # by now their threads wait
        began = time.monotonic()
        for _, pipe in members:
            pipe.send("start")
        answers = [pipe.recv() for _, pipe in members]
    finally:
        for process, pipe in members:
            try:
                pipe.send("leave")
            except OSError:
                process.kill()
        for process, _ in members:
            process.join(30)
    found = [each for _, several in answers for each in several]
    ranks = sorted(rank for rank, error in found if not error)
    return {
        "errors": [error for _, error in found if error][:3],
        "complete": ranks == list(range(nodes)),
        "last_s": max(moment for done, _ in answers for moment in done) - began,
        "stderr": Path(log).read_text(errors="replace").splitlines(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help="16 handlers, once, as a quick check")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    sizes = [16] if args.quick else list(MOST_SECONDS)
    repeats = 1 if args.quick else args.repeats
    processes.set_forkserver_preload(PRELOADED)
    progress = Progress(len(sizes) * 2 * repeats)
    rows, targets = [], []
    with tempfile.TemporaryDirectory(prefix="rally-bench-") as name:
        for nodes in sizes:
            for with_secret in (True, False):
                rounds = []
                for _ in range(repeats):
                    progress.step(
                        f"{nodes} handlers, {'with' if with_secret else 'without'} a secret"
                    )
                    rounds.append(round_of(nodes, with_secret, Path(name)))
                whole = [each for each in rounds if each["complete"]]
                row = {
                    "handlers": nodes,
                    "secret": with_secret,
                    "failed": len(rounds) - len(whole),
                    "errors": [error for each in rounds for error in each["errors"]][:3],
                    "to_last_handler_s": spread([each["last_s"] for each in whole]),
                    "lines_on_stderr": sum(len(each["stderr"]) for each in rounds),
                    "stderr": [line for each in rounds for line in each["stderr"]][:3],
                }
                rows.append(row)
                median, most = row["to_last_handler_s"]["median"], MOST_SECONDS.get(nodes)
                what = f"{nodes} handlers {'with' if with_secret else 'without'} a secret"
                if most is not None:
                    holds = median is not None and median <= most and not row["failed"]
                    targets.append({"what": f"{what}: s until all have met", "measured": median, "limit": most, "holds": holds})  # fmt: skip
                targets.append(
                    {"what": f"{what}: nothing on stderr", "holds": not row["lines_on_stderr"]}
                )
    progress.close()
    result = {
        "benchmark": "handlers",
        "quick": args.quick,
        "machine": machine(),
        "rows": rows,
        "targets": targets,
    }
    publish(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
