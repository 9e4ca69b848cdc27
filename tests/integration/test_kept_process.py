"""A worker that is told where to meet, by a supervisor that this test plays."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing

from pace import pace
from tcp_stores import ServedStore


SCRIPT = """
import os, sys
from rallypoint._core import supervisor_line
supervisor_line.hold(int(sys.argv[1]))
from rallypoint.elastic.worker import process
from rallypoint.errors import RendezvousConnectionError

worker = process.current()
worker._known["0/part"] = b"of the set-up"
worker._holds.add(0)
notice = worker.link.wait(0, 30)
while True:
    try:
        worker.form(notice)
        break
    except RendezvousConnectionError:
        print("not in", notice.generation, flush=True)
        notice = worker.link.wait(notice.generation, 30)
print("met in", notice.generation, flush=True)
"""


def test_who_waits_for_a_store_that_nobody_serves_hears_of_the_next_one() -> None:
    """A node served the workers' store, and left before it did: the nodes have met once more since."""
    ours, theirs = socket.socketpair()
    with closing(ServedStore()) as store, socket.create_server(("127.0.0.1", 0)) as unserved, ours:
        port = unserved.getsockname()[1]
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RALLY_GENERATION": "0"}
        ranks = {"RANK": "0", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}

        def tell(generation: int, port: int) -> None:
            where = {"generation": generation, "host": "127.0.0.1", "port": port}
            record = {"kind": "lost", "ranks": [1], "why": "node 1 is lost", **where}
            ours.sendall(json.dumps(record).encode() + b"\n")

        with theirs:
            worker = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(theirs.fileno())],
                env={**os.environ, **variables, **ranks},
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[theirs.fileno()],
            )
        assert worker.stdout is not None
        try:
            assert b"kept expected" in ours.recv(4096)
            with socket.create_server(("127.0.0.1", 0)) as left:
                tell(1, left.getsockname()[1])
                left.settimeout(30)
                left.accept()[0].close()  # it is on its way there
                asked, _ = left.accept()
                began = time.monotonic()
                tell(2, store.port)
                assert worker.stdout.readline() == "not in 1\n"
                asked.close()
            assert worker.stdout.readline() == "met in 2\n"
            assert time.monotonic() - began < 2 * pace()
            assert store.get("rally/kept/0/part", 5.0) == b"of the set-up"
        finally:
            worker.kill()
            worker.wait()
            worker.stdout.close()
