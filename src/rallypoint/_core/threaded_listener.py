"""A listener whose connections are each served by a thread, for servers with few members.

Until a connection has authenticated, it counts as a stranger's, and these are limited in number (:mod:`.half_open`): whoever can
reach the port must not use up this process's threads and descriptors.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from . import forks
from .half_open import HalfOpen, source_of


# The most strangers at a time.
MOST_STRANGERS = 64
# Seconds until the next try when a process has no descriptor or thread left.
_AGAIN = 0.1

# Serves one connection, until it ends. Calls its second argument once the other end has authenticated.
Serve = Callable[[socket.socket, Callable[[], None]], None]


class ThreadedListener:
    """Accepts connections until :meth:`close`.

    Args:
        listener: bound and listening; it is taken over.
        serve: called in a thread of its own; the connection is closed when it returns. Raises nothing.
        name: the threads' name.
    """

    def __init__(self, listener: socket.socket, serve: Serve, name: str) -> None:
        self._listener = listener
        self._serve = serve
        self._name = name
        self._closed = threading.Event()
        self._lock = forks.Lock()
        self._half_open: HalfOpen[socket.socket] = HalfOpen(MOST_STRANGERS)
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name=f"{name}s", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._listener.getsockname()[1])

    def drain(self, seconds: float) -> None:
        """End all connections; what has arrived is still read. Blocks: until all are served, at most this long for each."""
        with self._lock:
            threads = self._threads.copy()
        for sock, thread in threads.items():
            _shut(sock)
            thread.join(seconds)

    def close(self) -> None:
        """Accept no more connections. Those being served continue; a second call does nothing."""
        self._closed.set()
        _shut(self._listener)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError:
                self._closed.wait(_AGAIN)  # out of descriptors, unless it is closed
                continue
            if not self._begin(sock, source_of(str(address[0]))):
                self._end(sock)
                self._closed.wait(_AGAIN)

    def _begin(self, sock: socket.socket, source: str) -> bool:
        """Start a thread for a connection. Returns whether one could be started."""
        thread = threading.Thread(target=self._run, args=(sock,), name=self._name, daemon=True)
        with self._lock:  # so drain() finds no thread that has not started
            crowded = self._half_open.add(sock, source)
            if crowded is not None:
                _shut(crowded[0])  # its thread closes it
            try:
                thread.start()
            except RuntimeError:
                return False
            self._threads[sock] = thread
        return True

    def _run(self, sock: socket.socket) -> None:
        try:
            self._serve(sock, lambda: self._welcome(sock))
        finally:
            self._end(sock)

    def _welcome(self, sock: socket.socket) -> None:
        with self._lock:
            self._half_open.remove(sock)

    def _end(self, sock: socket.socket) -> None:
        with self._lock:
            self._half_open.remove(sock)
            self._threads.pop(sock, None)
            sock.close()


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
