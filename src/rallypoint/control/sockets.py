"""Where the control sockets of this user's jobs are: one per supervisor, ``<id>.<pid>.<random>.sock``."""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path

from rallypoint._core import private, unix_listener, user_folder


_FOLDER = "jobs"
# The path of a Unix socket has at most 107 bytes.
_MAX_ID = 40


def folders() -> list[Path]:
    """The folders in which control sockets may be, whether they exist or not."""
    return [each / _FOLDER for each in user_folder.candidates()]


def safe(run_id: str) -> str:
    """A job's id as it is in the name of its socket."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", run_id)[:_MAX_ID]


def safe_id(path: Path) -> str:
    """What stands for the job's id in the name of a socket."""
    return path.name.rsplit(".", 3)[0]


def bind(run_id: str) -> tuple[socket.socket, Path]:
    """A listening socket under a new name.

    Raises:
        OSError: there is no private folder for it.
    """
    problem: OSError | None = None
    name = safe(run_id) or "job"
    for folder in folders():
        try:
            user_folder.check(folder.parent)
            private.make_folder(folder, exist_ok=True)
            path = folder / f"{name}.{os.getpid()}.{secrets.token_hex(4)}.sock"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.setblocking(False)
                unix_listener.listen(listener, path, 16)
            except OSError:
                listener.close()
                raise
            return listener, path
        except OSError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def present() -> list[Path]:
    """All control sockets, of living and dead supervisors, in the order of their names."""
    found: list[Path] = []
    for folder in folders():
        try:
            user_folder.check(folder.parent)
            found += folder.glob("*.sock")
        except OSError:
            continue
    return sorted(found)
