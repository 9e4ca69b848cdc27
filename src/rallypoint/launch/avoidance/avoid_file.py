"""The file of ``--avoid-hosts``: read when a job starts, and appended to when a host is lost or fails.

All nodes of a job may write to it at once, perhaps through a network file system: each reads and appends under a lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rallypoint.errors import ConfigError

from . import avoid_list
from .avoid_list import AvoidList
from .trouble import Trouble


# A larger file is not a list of hosts.
_MAX_SIZE = 4 << 20


def read(path: Path, shown: str) -> AvoidList:
    """Read the list. One that does not exist yet is empty.

    Args:
        path: the file's path.
        shown: the flag, for errors.

    Raises:
        ConfigError: it cannot be read, its folder does not exist, or it is not such a list.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_SIZE + 1)
    except FileNotFoundError:
        if not path.parent.is_dir():
            problem = f"the folder {path.parent} does not exist"
            raise ConfigError(shown, str(path), problem, "make it first") from None
        return AvoidList()
    except OSError as error:
        raise ConfigError(shown, str(path), f"cannot be read: {error.strerror}") from None
    if len(data) > _MAX_SIZE:
        raise ConfigError(shown, str(path), f"is larger than {_MAX_SIZE >> 20} MiB")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError(shown, str(path), "not a text file") from None
    return avoid_list.parse(text, f"{shown} {path}")


def add(path: Path, troubles: Sequence[Trouble]) -> None:
    """Append what is not in the list yet. Blocks while another process appends, and as long as the file system takes.

    Raises:
        OSError: it cannot be written.
        ConfigError: it is no longer such a list.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "r+b", buffering=0) as file:
        fcntl.lockf(file, fcntl.LOCK_EX)  # also a lock on NFS; ends with the descriptor
        known = file.read(_MAX_SIZE) or b""
        text = known.decode(errors="replace")
        new = avoid_list.parse(text, str(path)).missing(troubles)
        if not new:
            return
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        lines = avoid_list.lines_for(new, when).encode()
        if known and not known.endswith(b"\n"):
            lines = b"\n" + lines
        while lines:
            lines = lines[file.write(lines) :]
