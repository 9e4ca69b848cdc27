"""JSON messages with file descriptors, over a Unix socket pair, without blocking.

Supervisor and fork server talk over one ``SOCK_SEQPACKET`` pair: a message arrives whole or not at
all, together with its descriptors. The supervisor creates both ends, so no other user's process can
connect. Sending never blocks: messages queue while the peer is busy importing torch. A message that
is too long for the socket (thousands of file names as arguments) travels in a memory file.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from rallypoint._core import linux


# One message; a worker's environment delta is about 1 KB.
MAX_MESSAGE = 64 * 1024
MAX_FDS = 16
# Sent in place of a long message, which is then in a memory file: the last descriptor.
_IN_FILE = b'"in file"'

Message = dict[str, Any]  # Any: JSON values


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end of the line.

    Args:
        sock: a connected ``SOCK_SEQPACKET`` socket, which the channel takes over.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self.closed_by_peer = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def wants_write(self) -> bool:
        """True while messages are queued: call :meth:`flush` once the socket is writable."""
        return bool(self._outgoing)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message and send what the socket accepts. ``fds`` are duplicated: the caller keeps its own."""
        data = json.dumps(message, separators=(",", ":")).encode()
        own: list[int] = []
        try:
            for fd in fds:
                own.append(os.dup(fd))  # noqa: PERF401  if one fails, the earlier ones are closed
            if len(data) > MAX_MESSAGE:
                own.append(_in_file(data))
                data = _IN_FILE
        except OSError:
            for fd in own:
                os.close(fd)
            raise
        self._outgoing.append((data, own))
        self.flush()

    def flush(self) -> None:
        while self._outgoing:
            data, fds = self._outgoing[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self.closed_by_peer = True
                self._drop_outgoing()
                return
            self._outgoing.popleft()
            for fd in fds:
                os.close(fd)

    def receive(self, most: int | None = None) -> list[tuple[Message, list[int]]]:
        """Receive the pending messages, at most ``most`` of them. Sets ``closed_by_peer`` when the peer has closed.

        Raises:
            OSError: EMFILE: too many open files to receive a message's descriptors.
        """
        messages: list[tuple[Message, list[int]]] = []
        while not self.closed_by_peer and (most is None or len(messages) < most):
            fds = array.array("i")
            try:
                data, ancillary, flags, _addr = self._sock.recvmsg(
                    MAX_MESSAGE, socket.CMSG_SPACE(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except ConnectionResetError:
                self.closed_by_peer = True
                break
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            if flags & socket.MSG_CTRUNC:
                for fd in (*fds, *(each for _, others in messages for each in others)):
                    os.close(fd)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not data:
                self.closed_by_peer = True
                break
            rights = list(fds)
            if data == _IN_FILE:
                data = _from_file(rights.pop())
            messages.append((json.loads(data), rights))
        return messages

    def close(self) -> None:
        self._drop_outgoing()
        self._sock.close()

    def _drop_outgoing(self) -> None:
        for _data, fds in self._outgoing:
            for fd in fds:
                os.close(fd)
        self._outgoing.clear()


def _in_file(data: bytes) -> int:
    fd = linux.memfd_create("rally-message", linux.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def _from_file(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()
