"""The job's store, on the node that serves it: a process that the fork server forks, since torch is there already.

It is the one process below the fork server that outlives it: other nodes read there how this node ended. It ends with its line to
the supervisor, whatever that ended of.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from rallypoint._core import forks
from rallypoint.errors import RendezvousConnectionError

from .store_host import GO, READY


# Has the fork server make the process: gets copies of the bound socket and of the line's other end.
Ask = Callable[[socket.socket, socket.socket], None]


class HostedStore:
    """A store in a process of its own, until :meth:`close`."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            # Not by closing alone: a fork of this process may have a copy.
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()


def hosting(ask: Ask) -> Callable[[socket.socket], Callable[[], HostedStore]]:
    """What gets a store's process ready. Blocks until the fork server has imported torch.

    Raises:
        RendezvousConnectionError: the fork server has ended, or could not start it.
    """

    def prepare(listener: socket.socket) -> Callable[[], HostedStore]:
        with forks.opening():
            ours, theirs = socket.socketpair()
            forks.close_in_child(ours)
        with theirs:
            ask(listener.dup(), theirs.dup())
        if ours.recv(len(READY)) != READY:
            ours.close()
            raise RendezvousConnectionError("no process could be started to serve the job's store")

        def begin() -> HostedStore:
            with contextlib.suppress(OSError):  # it has ended: whoever comes is refused
                ours.send(GO)
            listener.close()
            return HostedStore(ours)

        return begin

    return prepare
