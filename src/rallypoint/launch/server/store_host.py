"""Processes that serve a store: one generation's, or the job's.

[Note: A generation's store] Workers meet at a c10d ``TCPStore``. It is served by a process of its own, so rank 0 may end early,
and it is new in every generation, so no worker can read what an earlier generation wrote. The
supervisor has bound the socket already: its port is known before torch is imported anywhere, and
between "free" and "bound" there is no moment at which somebody else could take it. Workers that
connect before we serve wait in the socket's backlog.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta

from rallypoint._core import process
from rallypoint._core.addresses import reached_at
from rallypoint._core.resolver import without_name_servers


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    held = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(held, 2)
        os.close(held)
        os.close(null)


# What the process of the job's store and its supervisor tell each other.
READY, GO = b"r", b"g"


def serve(listen_fd: int, port: int) -> None:
    """Serve a generation's store on an already listening socket until killed. Does not return.

    Where it cannot be served (no more open files allowed, say), that is said in a line.
    """
    _store = _serve(listen_fd, port, "workers' store")
    while True:
        signal.pause()


def serve_job(listen_fd: int, port: int, line_fd: int) -> None:
    """Serve the job's store on a bound socket until the supervisor's end of the line is closed. Does not return.

    It begins when it is told to: until then, somebody else may answer at that socket.
    """
    import torch.distributed  # noqa: F401  it takes its time: before it says that it is ready

    process.live_without_parent()  # whoever ends the fork server does not end the job's store
    line = socket.socket(fileno=line_fd)
    with contextlib.suppress(OSError):  # the supervisor has ended
        line.send(READY)
        if line.recv(len(GO)) == GO:
            _store = _serve(listen_fd, port, "job's store")
            line.recv(1)
    os._exit(0)


def _serve(listen_fd: int, port: int, what: str) -> object:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it by *

    # A TCPStore server also makes itself a client of itself.
    # Without name servers c10d cannot tell whom it serves, and warns of that: nobody needs to know.
    try:
        with socket.socket(fileno=os.dup(listen_fd)) as listener:
            host = reached_at(listener)
        with without_name_servers(), _without_stderr():
            return TCPStore(
                host,
                port,
                None,
                is_master=True,
                timeout=timedelta(seconds=30),
                wait_for_workers=False,
                master_listen_fd=listen_fd,
                use_libuv=True,  # clients of ours count on how it answers
            )
    except Exception as error:  # noqa: BLE001  c10d raises errors of several kinds
        why = (str(error) or type(error).__name__).splitlines()[0]
        os.write(2, f"rally: the {what} cannot be served at port {port}: {why}\n".encode())
        os._exit(1)
