"""What connections are made of: a line over a socket, and memory that both ends share."""

from __future__ import annotations

import socket
from collections.abc import Callable

from rallypoint.wire import tcp, tls
from rallypoint.wire.copying import Copier
from rallypoint.wire.frames import FrameParser
from rallypoint.wire.line import Line
from rallypoint.wire.recycler import Recycler
from rallypoint.wire.sharing import Sharing
from rallypoint.wire.shm import Budget
from rallypoint.wire.silence import Silence

from .unused_memory import UnusedMemory


class Lines:
    """Makes them; all of one agent share a budget, memory for what comes, and threads that copy.

    Args:
        shared_memory_bytes, heartbeat: as in the options.
        later: calls a function after so many seconds.
    """

    def __init__(
        self,
        shared_memory_bytes: int,
        heartbeat: float,
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._heartbeat = heartbeat
        unused = UnusedMemory(later)
        self.budget = Budget(shared_memory_bytes, unused.used)
        self._copier = Copier()
        self._recycler = Recycler(on_use=unused.used)
        unused.watch(self.budget, self._recycler)

    def share(self, side: socket.socket) -> Sharing:
        """The way of large buffers, over the second socket of a connection."""
        return Sharing(side, self.budget, self._copier.move)

    def line(self, sock: tls.Connection, kind: str) -> Line:
        """Over a connected socket of a transport of this kind."""
        silence = Silence(self._heartbeat) if kind in (tcp.KIND, tls.KIND) else None
        return tls.new_line(sock, FrameParser(allocate=self._recycler.allocate), kind, silence)

    def close(self) -> None:
        self._recycler.clear()
        self._copier.close()
