"""Log files of a limited size: a full one becomes ``stdout.log.1``, the one before it ``stdout.log.2``, and so on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rallypoint._core import log_folder, private

from .console import fd_writer
from .relay import Sink


def writer(fd: int, path: Path, limit: int) -> Sink:
    """A function that writes whole lines to a file, and starts another file before it grows too large.

    Args:
        fd: the file's descriptor, for appending; from then on it is that of the newest file.
        path: the file's path.
        limit: the most bytes of a file; 0: no limit.
    """
    write = fd_writer(fd)
    if not limit:
        return write
    size = os.fstat(fd).st_size

    def write_limited(data: bytes) -> None:
        nonlocal size
        if size and size + len(data) > limit:
            _rotate(fd, path)
            size = 0
        write(data)
        size += len(data)

    return write_limited


def _rotate(fd: int, path: Path) -> None:
    for number in range(log_folder.OLDER, 0, -1):
        younger = path if number == 1 else log_folder.older(path, number - 1)
        with contextlib.suppress(FileNotFoundError):
            younger.rename(log_folder.older(path, number))
    new = private.open_to_append(path)
    os.dup2(new, fd, inheritable=False)
    os.close(new)
