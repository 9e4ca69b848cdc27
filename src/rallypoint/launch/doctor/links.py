"""Measuring the connection between two nodes: latency, bandwidth and the offset of their clocks, over plain TCP.

One node connects, sends the token of the visit, and then either small messages, each of which is answered with the time
there, or as much as it can for a while. The other node answers everyone who has the token, each in a thread.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import time
from collections.abc import Callable

from rallypoint._core import addresses, clock
from rallypoint._core.threaded_listener import ThreadedListener

from .facts import Link


TOKEN_LENGTH = 16
CONNECT_PATIENCE, PATIENCE = 5.0, 15.0
PINGS = 30
# For this long, and at most this many bytes.
BULK_SECONDS, BULK_BYTES = 0.4, 256 << 20
_CHUNK = 256 << 10
_PING, _BULK = b"p", b"b"
_TIME, _COUNT = struct.Struct("!d"), struct.Struct("!Q")


class Answerer:
    """Answers measurements until it is closed.

    Args:
        address: to listen on.
        token: what others must send first.
    """

    def __init__(self, address: str, token: bytes) -> None:
        self._token = token
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        self._listener = ThreadedListener(listener, self._serve, "rally-doctor")
        self.port = self._listener.port

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: socket.socket, welcome: Callable[[], None]) -> None:
        with connection, contextlib.suppress(OSError, ConnectionError):
            connection.settimeout(PATIENCE)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_receive(connection, TOKEN_LENGTH), self._token):
                return
            welcome()
            if _receive(connection, 1) == _PING:
                while connection.recv(1):
                    connection.sendall(_TIME.pack(clock.wall()))
                return
            count = 0
            buffer = bytearray(_CHUNK)
            while received := connection.recv_into(buffer):
                count += received
            connection.sendall(_COUNT.pack(count))


def measure(source: int, target: int, address: str, port: int, token: bytes) -> Link:
    """Measure the connection from this node to another one."""
    try:
        with _connect(address, port, token, _PING) as connection:
            latency, offset = _ping(connection)
        with _connect(address, port, token, _BULK) as connection:
            bandwidth = _bulk(connection)
    except OSError as error:
        why = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return Link(source=source, target=target, problem=f"{address}:{port}: {why.lower()}")
    return Link(source=source, target=target, latency=latency, bandwidth=bandwidth, clock=offset)


def _connect(address: str, port: int, token: bytes, what: bytes) -> socket.socket:
    connection = addresses.connect(address, port, CONNECT_PATIENCE)
    connection.settimeout(PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What waits in the buffer when the time is up must still go through, so it must not take long over a slow network.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    connection.sendall(token + what)
    return connection


def _ping(connection: socket.socket) -> tuple[float, float]:
    """Half of the shortest round trip, and the offset of the other clock."""
    best, offset = float("inf"), 0.0
    for _ in range(PINGS):
        began, here = time.perf_counter(), clock.wall()
        connection.sendall(b"?")
        (there,) = _TIME.unpack(_receive(connection, _TIME.size))
        took = time.perf_counter() - began
        if took < best:
            best, offset = took, there - (here + took / 2)
    return best / 2, offset


def _bulk(connection: socket.socket) -> float:
    chunk = memoryview(bytes(_CHUNK))
    began, sent = time.perf_counter(), 0
    while sent < BULK_BYTES and time.perf_counter() - began < BULK_SECONDS:
        sent += connection.send(chunk)
    connection.shutdown(socket.SHUT_WR)
    (received,) = _COUNT.unpack(_receive(connection, _COUNT.size))
    return float(received) / (time.perf_counter() - began)


def _receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionResetError(0, "the other end has closed the connection")
        data += more
    return data
