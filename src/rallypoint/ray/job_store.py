"""The store at which the nodes of a job on Ray meet. The driver serves it, so each node may be lost."""

from __future__ import annotations

import uuid

from rallypoint._core import addresses
from rallypoint.rendezvous import versions
from rallypoint.rendezvous.backends.native_store import StoreServer, load
from rallypoint.rendezvous.backends.tcpstore import TcpStore
from rallypoint.rendezvous.guestbook import Guestbook
from rallypoint.rendezvous.introduction import Introduction
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec


class JobStore:
    """A store in this process, until :meth:`close`.

    Args:
        host: the address of this machine at which nodes reach it.
        run_id: of the job.
        nodes: as ``--nnodes`` says them.
        secret: of the job.
    """

    def __init__(self, host: str, run_id: str, nodes: str, secret: bytes) -> None:
        load()
        self.host = host
        self._server = StoreServer(addresses.bind_store(host, 0))
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

    @property
    def port(self) -> int:
        return self._server.port

    def close(self) -> None:
        self._server.close()


def _nobody(_text: str) -> None:
    """There is nobody yet who might not match."""
