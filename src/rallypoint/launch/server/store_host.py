"""The processes that serve a store: a generation's, or the job's.

[Note: A generation's store] Workers meet at a c10d ``TCPStore``. It has a process of its own, so rank 0 may exit early,
and each generation gets a new one, so no worker can read what an earlier generation wrote. The supervisor binds the
socket: its port is known before torch is imported anywhere, and no other process can take it. Workers that connect
before the store is served wait in the socket's backlog.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

from rallypoint._core import process
from rallypoint._core.addresses import reached_at
from rallypoint._core.resolver import without_name_servers
from rallypoint.launch import torch_private


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


# The first part of the code that a store's own interpreter runs.
OWN_INTERPRETER = "from rallypoint.launch.server.store_host import "
# Messages between the process of the job's store and its supervisor.
READY, GO = b"r", b"g"


def serve(listen_fd: int, port: int) -> None:
    """Serve a generation's store on an already listening socket until killed. Does not return.

    An error, such as too many open files, is reported in one line.
    """
    _store = _serve(_store_class(), listen_fd, port, "workers' store")
    while True:
        signal.pause()


def serve_job(listen_fd: int, port: int, line_fd: int) -> None:
    """Serve the job's store on a bound socket until the supervisor closes its end. Does not return.

    Starts serving on :data:`GO`: until then, another process may answer at that socket.
    """
    store_class = _store_class()  # slow, so load it before reporting READY
    process.live_without_parent()  # the job's store outlives the fork server
    line = socket.socket(fileno=line_fd)
    with contextlib.suppress(OSError):  # the supervisor has ended
        line.send(READY)
        if line.recv(len(GO)) == GO:
            _store = _serve(store_class, listen_fd, port, "job's store")
            line.recv(1)
    os._exit(0)


def _store_class() -> Any:
    code = sys.orig_argv[-1]
    if not code.startswith(OWN_INTERPRETER):
        return importlib.import_module("torch.distributed").TCPStore
    try:
        return torch_private.store_class()
    except Exception:  # noqa: BLE001  a torch of another kind
        # Import all of it, then, in a new interpreter: this one no longer can.
        os.execv(sys.executable, [*sys.orig_argv[:-1], f"import torch.distributed; {code}"])


def _serve(store_class: Any, listen_fd: int, port: int, what: str) -> object:
    # A TCPStore server also connects to itself as a client. Without name servers c10d cannot resolve
    # its peers' names, and warns; users do not need that warning.
    from datetime import timedelta

    try:
        with socket.socket(fileno=os.dup(listen_fd)) as listener:
            host = reached_at(listener)
        with without_name_servers(), _without_stderr():
            return store_class(
                host,
                port,
                None,
                is_master=True,
                timeout=timedelta(seconds=30),
                wait_for_workers=False,
                master_listen_fd=listen_fd,
                use_libuv=True,  # our client relies on its behaviour
            )
    except Exception as error:  # noqa: BLE001  c10d raises errors of several kinds
        why = (str(error) or type(error).__name__).splitlines()[0]
        os.write(2, f"rally: the {what} cannot be served at port {port}: {why}\n".encode())
        os._exit(1)
