"""Where to find the control sockets of this user's jobs: one per supervisor, ``<id>.<pid>.<random>.sock``."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from pathlib import Path

from rallypoint._core import private, process, unix_listener, user_folder


_FOLDER = "jobs"
# The names that :func:`bind` makes. Other files in the folder are not ours.
_NAME = re.compile(r"[A-Za-z0-9_-]+\.([0-9]{1,7})\.[0-9a-f]{8}\.sock")
# The path of a Unix socket has at most 107 bytes.
_MAX_ID = 40


def folders() -> list[Path]:
    """The folders in which control sockets may be, whether they exist or not."""
    return [each / _FOLDER for each in user_folder.candidates()]


def safe(run_id: str) -> str:
    """A job's id in the form used in its socket's name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", run_id)[:_MAX_ID]


def safe_id(path: Path) -> str:
    """The part of a socket's name that is made from the job's id."""
    return path.name.rsplit(".", 3)[0]


def pid(path: Path) -> int:
    """The pid of the socket's supervisor, in the supervisor's own pid namespace."""
    return int(path.name.rsplit(".", 3)[1])


def bind(run_id: str) -> tuple[socket.socket, Path]:
    """A listening socket with a new name. Removes the sockets that killed supervisors left behind.

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
    """All control sockets, of living and dead supervisors, sorted by name."""
    found: list[Path] = []
    for folder in folders():
        try:
            user_folder.check(folder.parent)
            found += [each for each in folder.glob("*.sock") if _NAME.fullmatch(each.name)]
        except OSError:
            continue
    return sorted(found)


def none_found() -> str:
    """What to say if there is no job: that there is none, or that this user has no folder in which one could be found."""
    reasons = []
    for folder in user_folder.candidates():
        try:
            user_folder.check(folder)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
        else:
            return "no job of this user runs on this host"
    return (
        f"no job of this user can be found on this host, because it has no private folder for them ({'; '.join(reasons)}):"
        " remove what is in the way, and start the jobs again"
    )


def is_dead(path: Path) -> bool:
    """Whether no process listens on a socket any more."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as line:
        line.settimeout(1.0)
        try:
            line.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True  # the second: it has ended, or another process has just removed its socket
        except OSError:
            return False
        return False


def _remove_dead() -> None:
    for path in present():
        # The pid is checked first, since connecting to each of many supervisors would take long. That alone does not suffice:
        # in another container that shares the folder, a supervisor may live whose pid is unknown here.
        if not process.is_running(pid(path)) and is_dead(path):
            with contextlib.suppress(OSError):
                path.unlink()
