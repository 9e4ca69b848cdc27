"""The job's store, in a process forked from the fork server, which has imported torch already.

This process outlives the fork server, because other nodes read from the store how this node ended.
It ends when its connection to the supervisor closes, for whatever reason.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from rallypoint._core import forks
from rallypoint.errors import RendezvousConnectionError

from .store_host import GO, READY


# Asks the fork server to start the process; takes copies of the bound socket and of the process's end of the connection.
Ask = Callable[[socket.socket, socket.socket], None]


class HostedStore:
    """A store in a process of its own, until :meth:`close`."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended
            # Closing is not enough: a fork of this process may hold a copy.
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()


def hosting(ask: Ask) -> Callable[[socket.socket], Callable[[], HostedStore]]:
    """A function that prepares a store's process. It blocks until the fork server has imported torch.

    Raises:
        RendezvousConnectionError: from that function: the fork server has ended, or could not start the process.
    """

    def prepare(listener: socket.socket) -> Callable[[], HostedStore]:
        with forks.opening():
            ours, theirs = socket.socketpair()
            forks.close_in_child(ours)
        with theirs:
            ask(listener.dup(), theirs.dup())
        if ours.recv(len(READY)) != READY:
            ours.close()
            raise RendezvousConnectionError("cannot start a process to serve the job's store")

        def begin() -> HostedStore:
            with contextlib.suppress(OSError):  # the process has ended: clients are refused
                ours.send(GO)
            listener.close()
            return HostedStore(ours)

        return begin

    return prepare
