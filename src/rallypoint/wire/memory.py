"""A transport within one process: for tests, and for a worker that calls itself.

A connection is still a pair of sockets, so that it ends, fills up and breaks as others do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections import deque

from rallypoint._core import forks
from rallypoint._core.clock import Deadline

from .transport import Address, Reach, Transport


KIND = "memory"
_numbers = itertools.count(1)
_listeners: dict[str, MemoryListener] = {}
_lock = forks.Lock()


class MemoryListener:
    def __init__(self) -> None:
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._waiting: deque[socket.socket] = deque()
        self._process = forks.process
        with forks.opening():
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        with _lock:
            _listeners[self._name] = self

    @property
    def address(self) -> Address:
        return self._name

    def fileno(self) -> int:
        return self._event

    def accept(self) -> socket.socket | None:
        os.eventfd_read(self._event)
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def source(self, sock: socket.socket) -> str:
        del sock
        return "this process"

    def offer(self, sock: socket.socket) -> None:
        self._waiting.append(sock)
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        # In a forked child, another thread of the parent may have held the lock.
        with _lock if self._process is forks.process else contextlib.nullcontext():
            if _listeners.pop(self._name, None) is None:
                return
            while self._waiting:
                self._waiting.popleft().close()
            os.close(self._event)


def connect(address: Address, deadline: Deadline) -> socket.socket:
    """Connect to a listener of this process.

    Raises:
        OSError: there is none of this name.
    """
    del deadline  # nothing here takes time
    with _lock:
        listener = _listeners.get(str(address))
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens at {address} in this process")
        with forks.opening():
            ours, theirs = map(forks.close_in_child, socket.socketpair())
        listener.offer(theirs)
    return ours


TRANSPORT = Transport(
    kind=KIND,
    reach=Reach.PROCESS,
    listen=lambda _: MemoryListener(),
    connect=lambda address, timeout, _: connect(address, Deadline(timeout)),
    private=True,
)
