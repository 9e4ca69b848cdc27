"""c10d's ``TCPStore`` behind :class:`~rallypoint.rendezvous.store.Store`: served by one node, used by all.

The one module of this package that imports torch, and only when a job has several nodes.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rallypoint._core import env as environment
from rallypoint._core.clock import Deadline
from rallypoint.errors import RendezvousConnectionError


# Between two attempts to connect: node 0 may be started minutes after the others.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
# A reply of the store itself (not a wait for a key) that takes longer means that it is gone.
REPLY_TIMEOUT = 15.0
# Keys read in one round trip.
CHUNK = 512


class TcpStore:
    """One connection to the store; the serving node's first one owns the server.

    Args:
        host: where it is served.
        port: its port.
        listener: on the serving node, the bound socket; the store takes it over.
        silence: seconds without an answer from the serving host's kernel after which the connection
            counts as broken; None leaves that to the system (some 15 minutes).
    """

    def __init__(
        self,
        host: str,
        port: int,
        listener: socket.socket | None = None,
        silence: float | None = None,
    ) -> None:
        # c10d warns in C++ of each wait that ends without its key; we say what is the matter ourselves.
        level = environment.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        with environment.overlay({"TORCH_CPP_LOG_LEVEL": level}):
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it by *

        self._host, self._port, self._silence = host, port, silence
        before = set(_open_sockets())
        with _as_connection_error(host, port):
            self._store: Any = TCPStore(
                "localhost" if listener is not None else host,
                port,
                None,
                is_master=listener is not None,
                timeout=timedelta(seconds=REPLY_TIMEOUT),
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        if silence is not None:
            _break_on_silence(before, port, silence)

    def set(self, key: str, value: bytes) -> None:
        with _as_connection_error(self._host, self._port):
            self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        with _as_connection_error(self._host, self._port):
            # One call that waits and reads is one round trip less than a wait and a read.
            self._store.set_timeout(timedelta(seconds=max(timeout, 0.001)))
            try:
                return bytes(self._store.get(key))
            finally:
                self._store.set_timeout(timedelta(seconds=REPLY_TIMEOUT))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        with _as_connection_error(self._host, self._port):
            for start in range(0, len(keys), CHUNK):
                found += self._get_chunk(keys[start : start + CHUNK])
        return found

    def _get_chunk(self, keys: Sequence[str]) -> list[bytes | None]:
        # c10d reads many keys at once only where all exist; else halves are tried.
        if self._store.check(list(keys)):
            return [bytes(value) for value in self._store.multi_get(list(keys))]
        if len(keys) == 1:
            return [None]
        half = len(keys) // 2
        return self._get_chunk(keys[:half]) + self._get_chunk(keys[half:])

    def add(self, key: str, amount: int) -> int:
        with _as_connection_error(self._host, self._port):
            return int(self._store.add(key, amount))

    def put_new(self, key: str, value: bytes) -> bytes:
        with _as_connection_error(self._host, self._port):
            return bytes(self._store.compare_set(key, "", value))

    def exists(self, key: str) -> bool:
        with _as_connection_error(self._host, self._port):
            return bool(self._store.check([key]))

    def delete(self, key: str) -> bool:
        with _as_connection_error(self._host, self._port):
            return bool(self._store.delete_key(key))

    def clone(self) -> TcpStore:
        return TcpStore(self._host, self._port, silence=self._silence)

    def close(self) -> None:
        """Give the connection back; the serving node's first one ends the server with it."""
        self._store = None


def _open_sockets() -> dict[str, int]:
    """This process's sockets: what they are called in /proc, and a descriptor of each."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:"):
            found[target] = int(name)
    return found


def _break_on_silence(before: set[str], port: int, seconds: float) -> None:
    """Have the kernel break connections whose other end has fallen silent (a cut cable, a lost host).

    c10d's calls wait for an answer without limit, and it offers no way to set one; but the sockets
    it has opened are this process's own. With TCP_USER_TIMEOUT (RFC 5482) a call in progress fails
    when its request stays unacknowledged, with keep-alives also one that only waits.
    """
    for name, fd in _open_sockets().items():
        if name in before:
            continue
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.getpeername()[1] != port:
                    continue
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                interval = max(1, int(seconds / 3))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
        except OSError:
            continue  # a listener, or closed again: none of the store's


@contextmanager
def _as_connection_error(host: str, port: int) -> Iterator[None]:
    from torch.distributed import DistError, DistStoreError

    try:
        yield
    except DistStoreError as error:
        # c10d says "wait timeout" for a key that does not come, and the same type for the rest.
        if "timeout" in str(error).lower():
            raise TimeoutError(str(error).splitlines()[0]) from None
        raise _gone(host, port, error) from None
    except (DistError, RuntimeError) as error:
        raise _gone(host, port, error) from None


def _gone(host: str, port: int, error: Exception) -> RendezvousConnectionError:
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return RendezvousConnectionError(f"the job's store at {host}:{port} is gone: {why[:200]}")


def wait_until_reachable(
    host: str, port: int, deadline: Deadline, stop: threading.Event, say: Callable[[str], None]
) -> None:
    """Wait until somebody listens there. Says once what is being waited for.

    Raises:
        RendezvousConnectionError: nobody did before the deadline, or ``stop`` was set; says why not.
    """
    pause, said = FIRST_PAUSE, False
    while True:
        left = deadline.remaining()
        try:
            socket.create_connection(
                (host.strip("[]"), port), timeout=min(5.0, left or 5.0)
            ).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        if deadline.expired() or stop.is_set():
            raise RendezvousConnectionError(
                f"cannot reach node 0 at {host}:{port}: {why}; is `rally run` started there, is"
                " --master-addr (or --rdzv-endpoint) right, and is the port open?"
            )
        if not said and pause > 4 * FIRST_PAUSE:
            said = True
            until = "" if left is None else f", for up to {left:.0f} s"
            say(f"waiting for node 0 at {host}:{port} ({why}){until}")
        stop.wait(min(pause, deadline.remaining() or pause))
        pause = min(pause * 2, LONGEST_PAUSE)
