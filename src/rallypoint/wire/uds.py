"""Unix sockets: between processes of one user on one host.

The address lies in the abstract name space: nothing is left over in the file system when a process is killed. It
has no permissions either, so each end asks the kernel whose process the other one is, and refuses other users'.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

from rallypoint._core import forks
from rallypoint._core.clock import Deadline

from .transport import Address, Reach, Transport, accepted


KIND = "uds"
# The largest that is given without privileges on most systems: fewer, longer writes.
_BUFFER = 212992
_CREDENTIALS = struct.Struct("3i")
# The kernel cuts it to somaxconn. Other users of the host can fill it; who finds it full tries again.
_BACKLOG = 4096


def peer_uid(sock: socket.socket) -> int:
    """Whose process the other end is, as the kernel knows."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


class UnixListener:
    def __init__(self) -> None:
        self._sock = _new_socket()
        self._name = f"rallypoint-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._sock.bind("\0" + self._name)
            self._sock.listen(_BACKLOG)
            self._sock.setblocking(False)
        except OSError:
            self._sock.close()
            raise

    @property
    def address(self) -> Address:
        return self._name

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> socket.socket | None:
        sock = accepted(self._sock)
        if sock is None:
            return None
        if peer_uid(sock) not in (os.geteuid(), 0):
            sock.close()
            return None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        return sock

    def source(self, sock: socket.socket) -> str:
        return f"user {peer_uid(sock)}"

    def close(self) -> None:
        self._sock.close()


def _new_socket() -> socket.socket:
    with forks.opening():
        return forks.close_in_child(
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        )


def connect(address: Address, deadline: Deadline) -> socket.socket:
    """Connect to a listener of this user's (or root's).

    Raises:
        BlockingIOError: too many others wait to be let in.
        OSError: nobody listens there, or somebody else.
    """
    sock = _new_socket()
    try:
        sock.settimeout(deadline.remaining())
        sock.connect("\0" + str(address))
        if peer_uid(sock) not in (os.geteuid(), 0):
            raise PermissionError("another user listens on this address")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    except OSError:
        sock.close()
        raise
    return sock


TRANSPORT = Transport(
    kind=KIND,
    reach=Reach.HOST,
    listen=lambda _: UnixListener(),
    connect=lambda address, timeout, _: connect(address, Deadline(timeout)),
    private=True,
    shares_memory=True,
)
