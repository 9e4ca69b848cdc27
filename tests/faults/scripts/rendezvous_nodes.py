"""Nodes of a job that only meet: forked from one process that has loaded torch, each a process of its own.

Each line of JSON on standard input starts a node; the answer is its pid. A node appends what it sees to a
file, as lines of JSON. After a round it waits until a node or the store is lost, or a node waits to be
admitted; then it goes to the next round, as a launcher does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # noqa: F401  # loaded once, for all of them

from rallypoint.rendezvous.backend import Endpoint, HostPort, Meeting
from rallypoint.rendezvous.create import home_for
from rallypoint.rendezvous.dynamic import DynamicRendezvous, Listener
from rallypoint.rendezvous.protocol import Timing
from rallypoint.rendezvous.quorum import Settings


def run(order: dict[str, Any]) -> None:
    out = Path(order["out"])
    lock = threading.Lock()

    def tell(what: str, **more: Any) -> None:
        with lock, out.open("a") as file:
            file.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")

    hosts = tuple(HostPort(host, port) for host, port in order["hosts"])
    meeting = Meeting(
        endpoint=Endpoint(scheme="tcp", backend="tcpstore", hosts=hosts),
        run_id="job",
        lease=order["lease"],
        is_host=order.get("is_host"),
        say=lambda text: tell("says", text=text),
    )
    home = home_for(meeting)
    changed = threading.Event()

    def on_loss(loss: Any) -> None:
        tell("loss", rank=loss.neighbour.rank, certain=loss.certain, left=loss.left)
        changed.set()

    def on_store_lost(error: Exception) -> None:
        tell("store-lost", why=str(error))
        changed.set()

    handler = DynamicRendezvous(
        home,
        backend="c10d",
        run_id="job",
        settings=Settings(min_nodes=order["min"], max_nodes=order["max"], last_call=2.0),
        timing=Timing(join=order.get("join", 60.0), lease=order["lease"]),
        host=order["name"],
        local_addr="127.0.0.1",
        say=lambda text: tell("says", text=text),
        listener=Listener(on_loss=on_loss, on_store_lost=on_store_lost),
    )
    handler.bring({"workers": 1})
    while True:
        changed.clear()
        info = handler.next_rendezvous()
        place = home._current
        tell(
            "round",
            generation=info.generation,
            rank=info.rank,
            size=info.world_size,
            serves=handler.serves,
            store=[place.addr, place.port],
            hosts=[member.host for member in info.members] if order.get("members") else None,
        )
        while not changed.wait(0.1):
            waiting = handler.num_nodes_waiting()
            if waiting:
                tell("waiting", count=waiting)
                break
        handler.find_store()


def main() -> None:
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            run(order)
        except BaseException as error:
            with open(order["out"], "a") as file:
                why = {"what": "error", "type": type(error).__name__, "text": str(error)}
                file.write(json.dumps({**why, "trace": traceback.format_exc()}) + "\n")
        os._exit(1)


if __name__ == "__main__":
    main()
