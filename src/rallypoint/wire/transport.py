"""Ways from one process to another, and which one two processes take.

Each transport has a file of its own with a ``listen`` and a ``connect``: ``uds.py``, ``tcp.py``, ``memory.py``. TCP with TLS
(``tls.py``) is a transport of another name, ``tcp+tls``: who has the one does not meet who has the other.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from rallypoint._core import forks
from rallypoint.errors import ProtocolError


Address = str | tuple[str, int]

# Of an accept: whoever waits still waits, so the listener stays ready and must not be asked at once again.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class HungUp(ProtocolError):
    """The other end has closed the connection amid the handshake, and not said why."""


class Listener(Protocol):
    """Where others connect to."""

    @property
    def kind(self) -> str:
        """The transport's name."""

    @property
    def address(self) -> Address:
        """What the others are told."""

    def fileno(self) -> int:
        """Can be read from when somebody has connected."""

    def accept(self) -> socket.socket | None:
        """The next connection; None if it is one that is not let in, or has gone again.

        Raises:
            BlockingIOError: nobody waits.
            OSError: this process, or the host, has no descriptor or memory left for it: it goes on waiting.
        """

    def source(self, sock: socket.socket) -> str:
        """Whose connection this is, as far as the kernel knows: strangers of one source share what room there is."""

    def close(self) -> None: ...


def accepted(listening: socket.socket) -> socket.socket | None:
    """The next connection of a listening socket, as :meth:`Listener.accept` returns it."""
    try:
        with forks.opening():
            return forks.close_in_child(listening.accept()[0])
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return None


class Choice(NamedTuple):
    """A way that is worth trying."""

    kind: str
    address: Address


def choose(
    ours: Sequence[str], theirs: Mapping[str, Address], *, same_host: bool, same_process: bool
) -> list[Choice]:
    """The ways from us to a peer, the best first. Pure.

    Args:
        ours: the transports that we may use, the best first.
        theirs: where the peer listens.
        same_host: whether it is on this host, in namespaces that can see each other.
        same_process: whether it is this very process.
    """
    # What is not named reaches everybody.
    reach = {"memory": same_process, "uds": same_host}
    return [Choice(kind, theirs[kind]) for kind in ours if kind in theirs and reach.get(kind, True)]


def why_none(ours: Sequence[str], theirs: Mapping[str, Address]) -> str:
    """Why no way leads from us to a peer, as a clause about it. Pure."""
    same = "give all workers the same tls=..."
    if "tcp+tls" in ours and "tcp" in theirs:
        return f"it does not use TLS and this worker requires it: {same}"
    if "tcp" in ours and "tcp+tls" in theirs:
        return f"it requires TLS and this worker does not use it: {same}"
    return f"it offers {', '.join(theirs) or 'no transport'}, and this worker may use {', '.join(ours)}"
