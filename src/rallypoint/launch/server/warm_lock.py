"""What a warm server and its clients share: the lock under which servers start and end, and who is at the other end."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path


_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# A socket's mode: the first while its server is still importing, the second after that.
STARTING, READY = 0o600, 0o700


class WarmLock:
    """A context in which this process alone starts or ends warm servers of this user.

    Args:
        folder: the folder of their sockets.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._fd = -1

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def uid_of_peer(connection: socket.socket) -> int:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])
