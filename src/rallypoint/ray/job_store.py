"""The store at which the nodes of a job on Ray meet. The driver holds it, so each node may be lost.

It is served by a process of its own (``python -m`` this module), which ends with the driver: that need not import torch.
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
        host: the address of this machine at which nodes reach it.
        run_id: of the job.
        nodes: as ``--nnodes`` says them.
        secret: of the job.

    Raises:
        LaunchError: it cannot be served.
    """

    def __init__(self, host: str, run_id: str, nodes: str, secret: bytes) -> None:
        listener = addresses.bind_store(host, 0)
        self.port: int = listener.getsockname()[1]
        self._server = subprocess.Popen(
            # -P: not from the current folder, where a file may hide a module of Python's.
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
        # What a node does that serves the store of its job: the others look for it there.
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
    """There is nobody yet who might not match."""


def serve(fd: int) -> None:
    """Serve a store at a listening socket until standard input ends."""
    load()
    server = StoreServer(socket.socket(fileno=fd))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    server.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
