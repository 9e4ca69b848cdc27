"""Where the control sockets of this user's jobs are: one per supervisor, ``<id>.<pid>.<random>.sock``."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from pathlib import Path

from rallypoint._core import private, process, unix_listener, user_folder


_FOLDER = "jobs"
# What :func:`bind` makes. Anything else in the folder is somebody's own.
_NAME = re.compile(r"[A-Za-z0-9_-]+\.([0-9]{1,7})\.[0-9a-f]{8}\.sock")
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


def pid(path: Path) -> int:
    """Of the supervisor whose socket this is, as it is numbered there."""
    return int(path.name.rsplit(".", 3)[1])


def bind(run_id: str) -> tuple[socket.socket, Path]:
    """A listening socket under a new name. Removes what killed supervisors have left.

    Raises:
        OSError: there is no private folder for it.
    """
    _remove_dead()
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
            found += [each for each in folder.glob("*.sock") if _NAME.fullmatch(each.name)]
        except OSError:
            continue
    return sorted(found)


def is_dead(path: Path) -> bool:
    """Whether nobody listens at a socket any more."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as line:
        line.settimeout(1.0)
        try:
            line.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True  # the second: it has ended, or somebody else has just removed its socket
        except OSError:
            return False
        return False


def _remove_dead() -> None:
    for path in present():
        # With many supervisors on this host, asking each of them would take long. In another container, with the same folder
        # and its own numbers, a process may live whose number is not known here.
        if not process.is_running(pid(path)) and is_dead(path):
            with contextlib.suppress(OSError):
                path.unlink()
