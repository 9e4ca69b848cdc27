"""A worker's own stdout and stderr: live, and in whole lines.

Python buffers stdout in blocks if it is a pipe or a file: a killed job loses its last lines, and
lines of several ranks mix. A worker therefore writes each line as soon as it is complete, in one piece
(:mod:`rallypoint._core.whole_writes`).
"""

from __future__ import annotations

import ctypes
import io
import sys
import threading
from collections import deque
from typing import Any

from rallypoint._core.whole_writes import write_whole
from rallypoint.launch.config import Job


# Longer lines are written in pieces of this size.
MAX_LINE = 1024 * 1024
_LINE_BUFFERED = 1  # C's _IOLBF
# A signal handler that interrupts a flush flushes its own text, because the process may end in it. A handler
# that interrupts that one does not: signals faster than a busy pipe would nest without limit.
_MAX_DEPTH = 2


def make_live(job: Job) -> None:
    """Reinitialise stdout and stderr for their new descriptors, with the job's buffering.

    Keeps the objects, because modules imported earlier may refer to them.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, f"__{name}__")
        if type(stream) is not io.TextIOWrapper or stream is not getattr(sys, name):
            continue  # replaced (a notebook), or None
        # Not if only PYTHONUNBUFFERED is set, as in many container images: lines appear at once here anyway, which is
        # what it is for, and without a buffer the lines of several ranks mix.
        unbuffered = job.unbuffered
        live = name == "stdout" and not job.block_buffered
        raw = io.FileIO(fd, "wb", closefd=False)
        raw.name = f"<{name}>"
        buffer: Any = raw
        if not unbuffered:
            buffer = io.BufferedWriter(raw) if job.block_buffered else WholeLines(raw)
        stream.__init__(  # type: ignore[misc]
            buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=not unbuffered and (live or name == "stderr" or raw.isatty()),
            write_through=unbuffered,
        )
        if live:
            _make_c_live()


def _make_c_live() -> None:
    """Make C's stdout line-buffered too."""
    libc = ctypes.CDLL(None)
    try:
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
    except ValueError:
        return  # a C library with another name for it
    libc.setvbuf(stdout, None, _LINE_BUFFERED, 0)


class WholeLines(io.BufferedWriter):
    """A binary stream for a file or pipe that workers share: each flush is one write that others cannot split.

    Unlike its base it is reentrant, for signal handlers that print. After a Ctrl-C it does not wait
    again at exit for a blocked console.
    """

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw)
        self._fd = raw.fileno()
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._depths: dict[int, int] = {}  # thread -> flushes in progress

    def write(self, data: Any, /) -> int:
        if self.closed:
            raise ValueError("write to closed file")
        part = bytes(data)
        self._parts.append(part)
        self._size += len(part)
        if self._size > MAX_LINE or part.endswith(b"\n"):
            self.flush()
        return len(part)

    def flush(self) -> None:
        me = threading.get_ident()
        depth = self._depths.get(me, 0)
        if depth == _MAX_DEPTH:
            return  # the interrupted flush writes this text too
        self._depths[me] = depth + 1
        try:
            while data := self._take():
                try:
                    write_whole(self._fd, data)
                except OSError as error:
                    self._parts.appendleft(data[getattr(error, "written", 0) :])
                    raise
        finally:
            if depth:
                self._depths[me] = depth
            else:
                del self._depths[me]

    def _take(self) -> bytes:
        """Take all buffered data."""
        taken = []
        try:
            while True:
                taken.append(self._parts.popleft())
        except IndexError:
            pass
        self._size = 0
        return b"".join(taken)
