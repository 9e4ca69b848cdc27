"""A worker's own stdout and stderr: live, and in whole lines.

Python buffers stdout in blocks when it leads to a pipe or a file: the last lines of a job that is
killed are lost, and blocks of several ranks cut into each other's lines. A worker therefore writes
each line when it is complete, in one piece (:mod:`rallypoint._core.whole_writes`).
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


# A line that never ends is written in pieces of this size.
MAX_LINE = 1024 * 1024
_LINE_BUFFERED = 1  # C's _IOLBF
# A handler that prints writes by itself, though it has interrupted a flush: the process may end in it. One that
# interrupts that one does not: signals that come faster than a busy pipe takes text would nest without end.
_MAX_DEPTH = 2


def make_live(job: Job) -> None:
    """Make stdout and stderr anew for where they lead now, buffered as the job wants it.

    The objects stay: modules that were imported earlier may hold them.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, f"__{name}__")
        if type(stream) is not io.TextIOWrapper or stream is not getattr(sys, name):
            continue  # a notebook's, or none
        unbuffered = stream.write_through  # python -u, PYTHONUNBUFFERED
        live = name == "stdout" and not job.block_buffered
        if unbuffered and name == "stdout" and job.block_buffered:
            unbuffered = False
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
    """What C and C++ libraries print comes line by line, too."""
    libc = ctypes.CDLL(None)
    try:
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
    except ValueError:
        return  # a C library that names it otherwise
    libc.setvbuf(stdout, None, _LINE_BUFFERED, 0)


class WholeLines(io.BufferedWriter):
    """A binary stream that several workers share: each flush is one write, which no other's cuts.

    Unlike its base it may be entered again, by a signal handler that prints; and after a Ctrl-C it
    does not wait again, at exit, for the console that took nothing.
    """

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw)
        self._fd = raw.fileno()
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._depths: dict[int, int] = {}  # thread -> flushes that are under way in it

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
            return  # the flush that this signal handler has interrupted writes its text, too
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
        """What is to be written now."""
        taken = []
        try:
            while True:
                taken.append(self._parts.popleft())
        except IndexError:
            pass
        self._size = 0
        return b"".join(taken)
