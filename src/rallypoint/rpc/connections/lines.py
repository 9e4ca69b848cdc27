"""The parts of a connection: a line over a socket, and shared memory."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from rallypoint.wire import tls
from rallypoint.wire.copying import Copier
from rallypoint.wire.frames import FrameParser
from rallypoint.wire.line import Line
from rallypoint.wire.recycler import Recycler
from rallypoint.wire.seal import Keys, SealedParser
from rallypoint.wire.sealed_line import SealedLine, SealedSocket
from rallypoint.wire.sharing import Sharing
from rallypoint.wire.shm import Budget
from rallypoint.wire.silence import INFO_SIZE, Silence

from .unused_memory import UnusedMemory


logger = logging.getLogger(__name__)


class Lines:
    """Makes the parts of connections. All connections of an agent share a memory budget, buffers, and copying threads.

    Args:
        shared_memory_bytes, heartbeat: as in the options.
        later: calls a function after a delay in seconds.
    """

    def __init__(
        self,
        shared_memory_bytes: int,
        heartbeat: float,
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._heartbeat = heartbeat
        # Connections that ended because data was altered in transit.
        self.num_changed = 0
        unused = UnusedMemory(later)
        self.budget = Budget(shared_memory_bytes, unused.used)
        self._copier = Copier()
        self._recycler = Recycler(on_use=unused.used)
        unused.watch(self.budget, self._recycler)

    def share(self, side: socket.socket) -> Sharing:
        """Shared memory for large buffers, over the second socket of a connection."""
        return Sharing(side, self.budget, self._copier.move)

    def line(self, sock: tls.Connection, kind: str, keys: tuple[Keys, Keys] | None = None) -> Line:
        """A line over a connected socket of a transport of this kind.

        Args:
            keys: MAC keys for sending and receiving; None: no MAC.
        """
        silence = Silence(self._heartbeat) if _is_tcp(sock) else None
        allocate = self._recycler.allocate
        if keys is None or isinstance(sock, tls.TlsSocket):
            return tls.new_line(sock, FrameParser(allocate=allocate), kind, silence)
        sending, receiving = keys
        parser = SealedParser(receiving, allocate=allocate)
        sealed = SealedSocket(sock, sending, allocate)
        return SealedLine(sealed, parser, kind, changed=self._note_change, silence=silence)

    def _note_change(self) -> None:
        self.num_changed += 1
        if self.num_changed == 1:
            logger.warning(
                "a message was altered in transit: someone on the network changes packets, or hardware damages them. The connection"
                " was closed; rpc.statistics()['changed_frames'] counts such messages"
            )

    def close(self) -> None:
        self._recycler.clear()
        self._copier.close()


def _is_tcp(sock: tls.Connection) -> bool:
    """Whether the kernel reports how long the other host has been silent, whatever the transport."""
    try:
        return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_SIZE))
    except OSError:
        return False
