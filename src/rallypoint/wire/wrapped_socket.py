"""A socket that changes what is sent on it: sealed records, TLS. Calls that do not touch the bytes go to the real socket."""

from __future__ import annotations

import socket
from collections import deque


class WrappedSocket:
    """The methods of a socket that a line uses, except those that send and receive.

    Args:
        sock: connected; it is taken over.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._sock.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return self._sock.getsockopt(level, option, size)

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


def drop(left: deque[memoryview], count: int) -> None:
    """Remove the first ``count`` bytes."""
    while count:
        first = left.popleft()
        if count < len(first):
            left.appendleft(first[count:])
            return
        count -= len(first)
