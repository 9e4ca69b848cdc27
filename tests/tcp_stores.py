"""Stores for tests: torch's server in this process, and our client of it."""

from __future__ import annotations

import socket

from rallypoint.rendezvous.backends.native_store import StoreServer, load
from rallypoint.rendezvous.backends.tcpstore import TcpStore


class ServedStore(TcpStore):
    """The first connection to a server that ends with it."""

    def __init__(self, silence: float | None = None, listener: socket.socket | None = None) -> None:
        load()  # without torch, this ends before there is a socket
        self.server = StoreServer(listener or socket.create_server(("127.0.0.1", 0)))
        super().__init__("127.0.0.1", self.server.port, silence=silence)

    def close(self) -> None:
        super().close()
        self.server.close()
