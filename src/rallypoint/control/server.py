"""The control socket of a supervisor: receives requests from its user's processes, and sends the answers.

One descriptor in the supervisor's loop covers the socket and all connections. An answer that takes a while is made in its
own thread, which is started on demand.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rallypoint._core import forks, side_thread
from rallypoint.errors import RallyError

from . import messages, sockets


Answer = Mapping[str, Any]
# The answer to a request, or how to make it in another thread.
Handler = Callable[[dict[str, Any]], Answer | Callable[[], Answer]]

# More connections than this at once are refused.
MAX_CONNECTIONS = 16


_NO_THREAD = "no thread is left for the answer (see `ulimit -u`)"


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: memoryview | None = None
    is_asked: bool = False


class ControlServer:
    """Serves one job's control socket. All calls come from one thread.

    Args:
        run_id: the job's id, for the socket's name.
        handler: answers requests.

    Raises:
        OSError: there is no private folder for the socket.
    """

    def __init__(self, run_id: str, handler: Handler) -> None:
        self._handler = handler
        self._connections: dict[int, _Connection] = {}
        self._done: queue.SimpleQueue[tuple[_Connection, bytes]] = queue.SimpleQueue()
        self.path: Path
        with forks.opening():
            self._listener, self.path = sockets.bind(run_id)
            self._epoll = select.epoll()
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            forks.abandon_in_child(self)
        for fd in (self._listener.fileno(), self._wake):
            self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`serve` should be called."""
        return self._epoll.fileno()

    def serve(self) -> None:
        """Do whatever can be done without blocking."""
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._wake:
                self._send_what_is_done()
            elif fd in self._connections:
                self._go_on(self._connections[fd])

    def close(self) -> None:
        """Close all connections and remove the socket. A second call does nothing."""
        if self._wake < 0:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.abandon()

    def abandon(self) -> None:
        """Close all but keep the socket's path: in a forked child, it is the parent's. A second call does nothing."""
        if self._wake < 0:
            return
        self._epoll.close()
        self._listener.close()
        for each in self._connections.values():
            each.socket.close()
        self._connections.clear()
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _accept(self) -> None:
        try:
            with forks.opening():
                accepted, _ = self._listener.accept()
                if len(self._connections) >= MAX_CONNECTIONS or not _is_allowed(accepted):
                    accepted.close()
                    return
                self._connections[accepted.fileno()] = _Connection(accepted)
        except OSError:
            return  # the client has gone again, or a limit is reached
        accepted.setblocking(False)
        self._epoll.register(accepted.fileno(), select.EPOLLIN)

    def _go_on(self, connection: _Connection) -> None:
        if connection.unsent is not None:
            self._send(connection)
            return
        try:
            data = connection.socket.recv(messages.MAX_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        whole = b"\n" in connection.received
        if not data or (not whole and len(connection.received) > messages.MAX_REQUEST):
            self._drop(connection)
        elif whole and not connection.is_asked:
            connection.is_asked = True
            self._handle(connection, bytes(connection.received.partition(b"\n")[0]))

    def _handle(self, connection: _Connection, line: bytes) -> None:
        try:
            answer = self._handler(messages.unpack(line, "the client"))
        except (RallyError, OSError) as error:  # the second: no descriptor is left
            answer = {"error": str(error)}
        if not callable(answer):
            self._answer(connection, messages.pack(answer))
            return
        if not side_thread.begin(partial(self._make, connection, answer), "rally-control"):
            self._answer(connection, messages.pack({"error": _NO_THREAD}))

    def _make(self, connection: _Connection, make: Callable[[], Answer]) -> None:
        try:
            packed = messages.pack(make())
        except (RallyError, OSError, ValueError) as error:
            packed = messages.pack({"error": str(error)})
        self._done.put((connection, packed))
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._wake, 1)

    def _send_what_is_done(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while True:
            try:
                connection, packed = self._done.get_nowait()
            except queue.Empty:
                return
            if connection.socket.fileno() >= 0:
                self._answer(connection, packed)

    def _answer(self, connection: _Connection, packed: bytes) -> None:
        connection.unsent = memoryview(packed)
        self._epoll.modify(connection.socket.fileno(), select.EPOLLOUT)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        assert connection.unsent is not None
        try:
            while connection.unsent:
                sent = connection.socket.send(connection.unsent)
                connection.unsent = connection.unsent[sent:]
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        if self._connections.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        connection.socket.close()


def _is_allowed(connection: socket.socket) -> bool:
    """Whether the client is this user or root. No one else can enter the folder, but its mode may be changed."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    uid = struct.unpack("3i", credentials)[1]
    return uid in {os.geteuid(), 0}
