"""Atomic writes to a descriptor that several processes share.

A write to a file or terminal is atomic. A write to a pipe is only up to 4 KiB (``PIPE_BUF``), and a
full pipe accepts only what fits. So each writer holds a POSIX lock on the pipe's inode while it writes;
the kernel releases the lock if the holder dies.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager


# What is added to the error of a `print` whose reader is gone.
NOBODY_READS = "whoever read the output has closed it"


def write_whole(fd: int, data: bytes) -> None:
    """Write all of ``data`` without interleaving. Blocks until it is written.

    Raises:
        OSError: not all could be written; the error's ``written`` says how many bytes were.
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
            # Another process that shares the terminal or pipe has made it non-blocking.
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
            locked = False  # cannot be locked; short lines are still atomic
    try:
        yield
    finally:
        if locked:
            fcntl.lockf(fd, fcntl.LOCK_UN)
