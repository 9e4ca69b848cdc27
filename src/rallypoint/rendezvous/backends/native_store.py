"""torch's own ``TCPStore``: the server, and clients for code that needs c10d's. The only module here that imports torch."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING, Any

from rallypoint._core import addresses, env as environment, forks, resolver
from rallypoint.errors import RendezvousConnectionError

from .tcpstore import REPLY_TIMEOUT, TcpStore, break_on_silence


if TYPE_CHECKING:
    from datetime import timedelta

# Without this lock, two threads that each set and restore the variable could leave it changed.
_loading = forks.Lock()
# How c10d describes a client; there is no other way to get its descriptor.
_CLIENT = re.compile(r"TCPStore\(client=TCPClient\(SocketImpl\(fd=(\d+),")


class StoreServer:
    """A server in this process, until :meth:`close`.

    Args:
        listener: a bound socket, which the server takes over.

    Raises:
        RendezvousConnectionError: the store could not be served.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        host = addresses.reached_at(listener)
        self._store: Any = _connected(host, self.port, REPLY_TIMEOUT, listener)
        forks.abandon_in_child(self)

    def close(self) -> None:
        self._store = None  # the server ends with the last reference

    def abandon(self) -> None:
        """Drop the server in a forked child, which lacks its thread."""
        self._store = None


def client(store: TcpStore, timeout: float) -> Any:
    """c10d's own client of the same store, over a connection of its own. Blocks until it is connected.

    The kernel breaks the connection when the other host falls silent; nothing detects a server process that is stopped.

    Args:
        timeout: seconds that its ``get`` and ``wait`` wait for a key.

    Raises:
        RendezvousConnectionError: the store is gone.
    """
    load()
    made = _connected(resolver.numeric(store.host, store.port), store.port, REPLY_TIMEOUT, None)
    if store.silence is not None:
        _watch(made, store.silence)
    made.set_timeout(_seconds(timeout))
    return made


def _seconds(number: float) -> timedelta:
    from datetime import timedelta  # a supervisor, which makes neither, need not keep it in memory

    return timedelta(seconds=number)


def load() -> None:
    """Import torch, so that no deadline has to pay for it."""
    _tcp_store()


def _tcp_store() -> Any:
    # c10d's C++ code warns about each wait that ends without its key, and prints its stack when a connection
    # fails; we report these problems ourselves.
    level = environment.get("TORCH_CPP_LOG_LEVEL", "FATAL")
    # torch reads the variable once, when it is loaded, so it must be loaded here.
    with _loading, environment.overlay({"TORCH_CPP_LOG_LEVEL": level}):
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it by *
    return TCPStore


def _connected(host: str, port: int, timeout: float, listener: socket.socket | None) -> Any:
    make = _tcp_store()
    try:
        # A server is also a client of itself. c10d looks up the name of every address, only to print it, and
        # warns if there is none. (If torch was loaded earlier, it does not read the level above.)
        with resolver.without_name_servers(), resolver.quiet:
            return make(
                host,
                port,
                None,
                is_master=listener is not None,
                timeout=_seconds(timeout),
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
                use_libuv=True,  # our client relies on how this server answers
            )
    except RuntimeError as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise RendezvousConnectionError(
            f"the job's store at {host}:{port} is gone: {why[:200]}"
        ) from None


def _watch(client: Any, silence: float) -> None:
    """Have the kernel watch the client's connection, unless this torch describes it in another way than :data:`_CLIENT`."""
    with resolver.without_name_servers(), resolver.quiet:  # as when it connects
        found = _CLIENT.match(repr(client))
    if found is None:
        return
    with socket.socket(fileno=os.dup(int(found[1]))) as sock:
        break_on_silence(sock, silence)
