"""Writing to a descriptor that several processes share, so that no text of another stands in between.

A file or a terminal takes one write as a whole. A pipe promises that for 4 KiB only (``PIPE_BUF``),
and a full one takes what fits. So each writer locks the pipe itself (a POSIX lock on its inode,
which the kernel releases if the holder dies) for as long as it writes.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager


def write_whole(fd: int, data: bytes) -> None:
    """Write all of ``data``, with no other writer's in between. Blocks until it is taken.

    Raises:
        OSError: it cannot be written, or not all of it; ``written`` of the error says how much was.
    """
    left = memoryview(data)
    try:
        with _alone_on(fd):
            while left:
                left = left[_write_some(fd, left) :]
    except OSError as error:
        error.written = len(data) - len(left)  # type: ignore[attr-defined]
        raise


def _write_some(fd: int, data: memoryview) -> int:
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            # Somebody who shares the terminal or pipe with us made it non-blocking.
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            poller.poll()


@contextmanager
def _alone_on(fd: int) -> Iterator[None]:
    mode = os.fstat(fd).st_mode
    locked = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    if locked:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX)
        except OSError:
            locked = False  # it cannot be locked: short lines are whole nevertheless
    try:
        yield
    finally:
        if locked:
            fcntl.lockf(fd, fcntl.LOCK_UN)
