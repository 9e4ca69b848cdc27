"""Unix sockets that listen at a path."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def listen(listener: socket.socket, path: Path, backlog: int, mode: int | None = None) -> None:
    """Bind a socket to a path, and listen there.

    The path appears once connections are accepted. A process that finds a socket that refuses them takes the owner
    for dead, and removes the path.

    Args:
        mode: the path's mode.

    Raises:
        OSError: a socket of this name cannot be made.
    """
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    listener.bind(os.fspath(new))
    try:
        if mode is not None:
            new.chmod(mode)
        listener.listen(backlog)
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
