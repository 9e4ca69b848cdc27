"""A job's metrics on a port: enough HTTP for a scraper, in the supervisor's loop.

One descriptor in that loop covers the port and all connections, as in :mod:`rallypoint.control.server`.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from rallypoint._core import addresses, forks

from . import openmetrics


# When more connections than this are open, the oldest one is closed.
MAX_CONNECTIONS = 16
MAX_REQUEST = 8192


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: memoryview | None = None


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket; without a host, on the addresses of both IP families."""
    if not host and socket.has_dualstack_ipv6():
        both = socket.AF_INET6
        return socket.create_server((host, port), family=both, backlog=16, dualstack_ipv6=True)
    name = addresses.as_asked(host) or None
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = found[0]
    return socket.create_server(address[:2], family=family, backlog=16)


class MetricsServer:
    """Serves ``GET /metrics``. All calls come from one thread.

    Args:
        host: the address to listen on; empty: all.
        port: the port to listen on; 0: any free one.
        make: makes the text.

    Raises:
        OSError: the port is in use, or the address is not this host's.
    """

    def __init__(self, host: str, port: int, make: Callable[[], str]) -> None:
        self._make = make
        self._connections: dict[int, _Connection] = {}
        with forks.opening():
            self._listener = _listener(host, port)
            self._listener.setblocking(False)
            self._epoll = select.epoll()
            forks.abandon_in_child(self)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self.port: int = self._listener.getsockname()[1]

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`serve` should be called."""
        return self._epoll.fileno()

    def serve(self) -> None:
        """Do whatever can be done without blocking."""
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._connections:
                self._go_on(self._connections[fd])

    def close(self) -> None:
        """Close the port and all connections. A second call does nothing."""
        for each in self._connections.values():
            each.socket.close()
        self._connections.clear()
        self._listener.close()
        self._epoll.close()

    abandon = close

    def _accept(self) -> None:
        try:
            with forks.opening():
                accepted, _ = self._listener.accept()
        except OSError:
            return  # the client has gone again, or a limit is reached
        accepted.setblocking(False)
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop(next(iter(self._connections.values())))
        self._connections[accepted.fileno()] = _Connection(accepted)
        self._epoll.register(accepted.fileno(), select.EPOLLIN)

    def _go_on(self, connection: _Connection) -> None:
        if connection.unsent is not None:
            self._send(connection)
            return
        try:
            data = connection.socket.recv(MAX_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        if not data or len(connection.received) > MAX_REQUEST:
            self._drop(connection)
        elif b"\r\n\r\n" in connection.received:
            connection.unsent = memoryview(self._answer(bytes(connection.received)))
            self._epoll.modify(connection.socket.fileno(), select.EPOLLOUT)
            self._send(connection)

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        status, kind, body = "200 OK", openmetrics.CONTENT_TYPE, ""
        if method not in {b"GET", b"HEAD"}:
            status, kind, body = "405 Method Not Allowed", "text/plain", "only GET\n"
        elif path != b"/metrics":
            status, kind, body = "404 Not Found", "text/plain", "the metrics are at /metrics\n"
        else:
            body = self._make()
        data = body.encode(errors="replace")
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == b"HEAD" else data)

    def _send(self, connection: _Connection) -> None:
        assert connection.unsent is not None
        try:
            while connection.unsent:
                sent = connection.socket.send(connection.unsent)
                connection.unsent = connection.unsent[sent:]
        except BlockingIOError:
            return
        except OSError:
            pass  # the client has gone
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        if self._connections.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        connection.socket.close()
