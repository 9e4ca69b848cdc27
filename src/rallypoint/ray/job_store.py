"""The store at which the nodes of a job on Ray meet. The driver holds it, so any node may be lost.

A separate process (``python -m`` this module) serves it and ends with the driver, so the driver need not import torch.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid

from rallypoint._core import addresses
from rallypoint.errors import LaunchError
from rallypoint.rendezvous import versions
from rallypoint.rendezvous.backends.native_store import StoreServer, load
from rallypoint.rendezvous.backends.tcpstore import TcpStore
from rallypoint.rendezvous.guestbook import Guestbook
from rallypoint.rendezvous.introduction import Introduction
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec


class JobStore:
    """A store on this machine, until :meth:`close`.

    Args:
        host: the address at which nodes reach this machine.
        run_id: the job's name.
        nodes: the number of nodes in the form of ``--nnodes``.
        secret: the job's secret.

    Raises:
        LaunchError: it cannot be served.
    """

    def __init__(self, host: str, run_id: str, nodes: str, secret: bytes) -> None:
        listener = addresses.bind_store(host, 0)
        self.port: int = listener.getsockname()[1]
        self._server = subprocess.Popen(
            # -P: do not import from the current folder, where a file may hide one of Python's modules.
            [sys.executable, "-P", "-m", __name__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the driver
        )
        listener.close()
        assert self._server.stdout is not None
        if not self._server.stdout.readline():
            self.close()
            raise LaunchError("the store of the job could not be started: see above")
        # As a node that serves its job's store does: the other nodes look for these records.
        me = Introduction(
            node_id=uuid.uuid4().hex,
            host=addresses.hostname(),
            run_id=run_id,
            nodes=nodes,
            given_rank=False,
            rallypoint=versions.rallypoint(),
            torch=versions.torch(),
            python=versions.python(),
        )
        store = TcpStore(host, self.port)
        try:
            Guestbook(me, secret, _nobody, "").visit(store, serves=True, newcomer=True)
            name = {"name": uuid.uuid4().hex, "moves": 0}
            RecordStore(store, Codec(run_id, secret)).claim("store", name)
        finally:
            store.close()

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


def _nobody(_text: str) -> None:
    """There is no other node yet that might not match."""


def serve(fd: int) -> None:
    """Serve a store on a listening socket until standard input is closed."""
    load()
    server = StoreServer(socket.socket(fileno=fd))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    server.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
