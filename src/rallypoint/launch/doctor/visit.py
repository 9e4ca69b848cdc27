"""What the workers of ``rally doctor`` do, one on each node: exchange facts and measure their connections.

They meet at their store, like the workers of any job. At the end, each writes everything known to a file on its own node.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from rallypoint._core import env as environment

from . import links, pairs, probe
from .facts import AllReduce, Link, NodeFacts


# Seconds until another node has taken its turn; it may be waiting for connections that time out.
PATIENCE = 120.0
GLOO_PATIENCE = 30.0
_SMALL, _LARGE, _TIMES = 1, 1 << 18, 3  # elements of 4 bytes


def main(result: str, workers: str, log_folder: str) -> None:
    """Visit the other nodes, and write what was found.

    Args:
        result: a file to write it to.
        workers: how many the job has on this node; empty: one per device.
        log_folder: the job's log folder; empty: none given.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it by *

    env = environment.snapshot()
    rank, count = int(env["RANK"]), int(env["WORLD_SIZE"])
    store: Any = TCPStore(
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        count,
        False,
        timeout=timedelta(seconds=PATIENCE),
    )
    own = probe.facts(int(workers) if workers else None, log_folder or None)
    _, address = own.gloo
    if rank == 0:
        store.set("doctor/token", secrets.token_bytes(links.TOKEN_LENGTH))
    token = bytes(store.get("doctor/token"))
    answerer = links.Answerer(address, token)
    store.set(f"doctor/facts/{rank}", json.dumps([own.to_json(), address, answerer.port]))
    told = [json.loads(store.get(f"doctor/facts/{each}")) for each in range(count)]
    where = [(str(address), int(port)) for _, address, port in told]
    measured = _measure(store, rank, where, token)
    store.set(f"doctor/links/{rank}", json.dumps([asdict(each) for each in measured]))
    found = [
        Link(**each)
        for other in range(count)
        for each in json.loads(store.get(f"doctor/links/{other}"))
    ]
    reduced = AllReduce()
    if not any(each.problem for each in found):
        reduced = _all_reduce(store, rank, count)
    document = {
        "nodes": [facts for facts, _, _ in told],
        "links": [asdict(each) for each in found],
        "all_reduce": asdict(reduced),
        "node": rank,
    }
    part = Path(result).with_suffix(".part")
    part.write_text(json.dumps(document))
    part.rename(result)
    answerer.close()
    # The store ends with this job on its node: all others must have read it by then.
    store.set(f"doctor/end/{rank}", b"")
    store.wait([f"doctor/end/{each}" for each in range(count)])


def _measure(store: Any, rank: int, where: Sequence[tuple[str, int]], token: bytes) -> list[Link]:
    """Take this node's turns: each pair is measured in both directions, one after the other."""
    found = []
    for number, turn in enumerate(pairs.turns(len(where))):
        for way in ("there", "back"):
            for pair in turn:
                source, target = pair if way == "there" else reversed(pair)
                if rank == source:
                    found.append(links.measure(rank, target, *where[target], token))
            _meet(store, rank, f"{number}/{way}", len(where))
    return found


def _meet(store: Any, rank: int, turn: str, count: int) -> None:
    store.set(f"doctor/turn/{turn}/{rank}", b"")
    store.wait([f"doctor/turn/{turn}/{each}" for each in range(count)])


def _all_reduce(store: Any, rank: int, count: int) -> AllReduce:
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as above

    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("doctor/group", store),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=GLOO_PATIENCE),
        )
        small, large = (_best_time(dist, torch.ones(size)) for size in (_SMALL, _LARGE))
        dist.destroy_process_group()
    except RuntimeError as error:
        return AllReduce(problem=str(error).splitlines()[0][:200])
    return AllReduce(latency=small, bandwidth=_LARGE * 4 / large)


def _best_time(dist: Any, data: Any) -> float:
    times = []
    for _ in range(_TIMES):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        times.append(time.perf_counter() - began)
    return min(times)


def read(file: Path) -> tuple[list[NodeFacts], list[Link], AllReduce]:
    """What a visit has found.

    Raises:
        OSError: it did not end well.
    """
    document = json.loads(file.read_text())
    nodes = [NodeFacts.from_json(each) for each in document["nodes"]]
    found = [Link(**each) for each in document["links"]]
    return nodes, found, AllReduce(**document["all_reduce"])


if __name__ == "__main__":
    main(*sys.argv[1:4])
    os._exit(0)
