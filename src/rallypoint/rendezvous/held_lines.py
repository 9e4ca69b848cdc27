"""Holds connections on which nothing is said, and keeps strangers' connections from filling the port."""

from __future__ import annotations

import resource
import select
import socket

from rallypoint._core import forks
from rallypoint._core.half_open import HalfOpen, room, source_of


# How many connections are accepted before held ones are polled again.
_AT_ONCE = 64
# All nodes of a job may watch the same node, so in practice only the process's limit counts.
_MOST = 1 << 16


class HeldLines:
    """One listener's held connections, in a poll object that the caller waits on.

    Args:
        listener: a non-blocking socket.
        poller: the connections are registered there, for reading.
        most: how many to hold; by default, as many as the process's limit of open files allows.
    """

    def __init__(
        self, listener: socket.socket, poller: select.poll, most: int | None = None
    ) -> None:
        if most is None:
            most = room(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST)
        self._listener = listener
        self._poller = poller
        self._lines: dict[int, socket.socket] = {}
        self._half_open: HalfOpen[int] = HalfOpen(most)

    def accept(self) -> bool:
        """Accept waiting connections, some at a time. False if no descriptors are left for them; they keep waiting."""
        for _ in range(_AT_ONCE):
            try:
                with forks.opening():
                    line, address = self._listener.accept()
                    forks.close_in_child(line)
            except BlockingIOError:
                return True
            except ConnectionError:
                continue  # gone again
            except OSError:
                return False
            line.setblocking(False)
            crowded = self._half_open.add(line.fileno(), source_of(address[0]))
            if crowded is not None:
                self.take(crowded[0]).close()
            self._lines[line.fileno()] = line
            self._poller.register(line, select.POLLIN)
        return True

    def newcomers_last(self, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The poll object's events, the listener's last: a newcomer may get the descriptor of the line closed to make room."""
        listener = self._listener.fileno()
        return sorted(events, key=lambda event: event[0] == listener)

    def __contains__(self, fd: int) -> bool:
        return fd in self._lines

    def take(self, fd: int) -> socket.socket:
        """Take a line out; it is no longer held."""
        self._half_open.remove(fd)
        self._poller.unregister(fd)
        return self._lines.pop(fd)

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()
