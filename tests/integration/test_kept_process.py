"""A worker that is told where to meet by a supervisor, whose part this test plays."""

from __future__ import annotations

import json
import os
import select
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
worker._records._known["0/part"] = b"of the set-up"
worker._records.note_read(0)
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
    """A node was to serve the workers' store and left before it did; the nodes have met once more since."""
    ours, theirs = socket.socketpair()
    with closing(ServedStore()) as store, socket.create_server(("127.0.0.1", 0)) as unserved, ours:
        port = unserved.getsockname()[1]
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RALLY_GENERATION": "0"}
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}

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


NEWCOMER = """
import sys
from rallypoint._core import supervisor_line
supervisor_line.hold(int(sys.argv[1]))
import torch
import torch.distributed as dist
from rallypoint import elastic

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""


def test_a_newcomer_whose_store_is_lost_waits_to_be_ended() -> None:
    """Otherwise it would blame the script for the results that it cannot read."""
    ours, theirs = socket.socketpair()
    with closing(ServedStore()) as store, ours:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
        kind = {"RALLY_GENERATION": "1", "RALLY_TAKES_OVER": "1"}
        with theirs:
            worker = subprocess.Popen(
                [sys.executable, "-c", NEWCOMER, str(theirs.fileno())],
                env={**os.environ, **where, **ranks, **kind},
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[theirs.fileno()],
            )
        assert worker.stderr is not None
        try:
            assert store.get("rally/kept/seen/1", 30.0) == b"1"  # it waits for its record
            store.close()
            assert not select.select([worker.stderr], [], [], 1.0)[0]
            ours.close()
            _, said = worker.communicate(timeout=30)
            assert "RendezvousConnectionError" in said
            assert "first start" not in said
        finally:
            worker.kill()
            worker.communicate()
