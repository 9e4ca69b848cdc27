"""Unix sockets between processes of one user on one host.

Addresses are in the abstract namespace, so that a killed process leaves nothing in the file system. They have no
permissions, so each end asks the kernel for the user of the other one, and refuses other users.
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
# The largest that most systems allow without privileges: fewer and larger writes.
_BUFFER = 212992
_CREDENTIALS = struct.Struct("3i")
# The kernel limits it to somaxconn. Other users can fill it; a client that finds it full retries.
_BACKLOG = 4096


def peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end, from the kernel."""
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
    """Connect to a listener of this user or of root.

    Raises:
        BlockingIOError: the listener's backlog is full.
        OSError: the address has no listener, or one of another user.
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
