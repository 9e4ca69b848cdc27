"""The hosts' output, on its way to a stream of this terminal.

A thread writes it. A stopped terminal (Ctrl-S, a pager) does not hold up the threads that read from the hosts until a
megabyte is waiting; then it slows down the workers that print, as a pipe does.
"""

from __future__ import annotations

import collections
import os
import select
import threading
from collections.abc import Callable
from typing import Any, TextIO


# How many bytes may wait before whoever prints has to.
_ROOM = 1 << 20


class TerminalOutput:
    """Writes to standard output and standard error, in the order in which it receives the parts.

    Args:
        streams: the streams to write to; None for a closed one (``2>&-``).
    """

    def __init__(self, *streams: TextIO | None) -> None:
        self._streams = streams
        self._parts: collections.deque[tuple[TextIO | None, bytes]] = collections.deque()
        self._waiting = 0  # bytes
        self._no_more = False
        self._changed = threading.Condition()
        self._written = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._write, name="rally-output", daemon=True)
        self._thread.start()

    def takes(self, stream: TextIO | None) -> bool:
        """Whether this is one of its streams."""
        return any(stream is each for each in self._streams)

    def put(self, stream: TextIO | None, text: bytes) -> None:
        """Write this after what came before. Does not block."""
        if text:
            with self._changed:
                self._parts.append((stream, text))
                self._waiting += len(text)
                self._changed.notify_all()

    def wait_for_room(self, no_longer: Callable[[], bool]) -> None:
        """Block while too much is waiting to be written.

        Args:
            no_longer: whether to return all the same; asked again after :meth:`wake`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting < _ROOM or no_longer())

    def wake(self) -> None:
        """Have those who wait for room check again whether they must."""
        with self._changed:
            self._changed.notify_all()

    def finish(self) -> int:
        """Say that nothing more will come. Returns a descriptor that becomes readable when all has been written."""
        with self._changed:
            self._no_more = True
            self._changed.notify_all()
        return self._written

    def close(self) -> None:
        """Close the descriptor, after :meth:`finish`. What has not been written yet is dropped."""
        with self._changed:
            self._parts.clear()
            written, self._written = self._written, -1
            if written >= 0:
                os.close(written)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._parts or self._no_more)
                if not self._parts:
                    if self._written >= 0:
                        os.eventfd_write(self._written, 1)
                    return
                stream, text = self._parts.popleft()
            try:
                _show(stream, text)
            except (OSError, ValueError):
                pass  # a closed terminal ends the job by SIGHUP, not by its output
            with self._changed:
                self._waiting -= len(text)
                self._changed.notify_all()


def outputs(standard: TextIO | None, errors: TextIO | None) -> list[TerminalOutput]:
    """One output for both streams if they lead to the same place, so that lines keep their order; else one for each."""
    try:
        ends: list[Any] = [os.fstat(each.fileno()) for each in (standard, errors) if each]
    except (OSError, ValueError, AttributeError):  # a notebook's, or a closed one
        ends = []
    if len(ends) == 2 and os.path.samestat(*ends):
        return [TerminalOutput(standard, errors)]
    return [TerminalOutput(standard), TerminalOutput(errors)]


def _show(stream: TextIO | None, text: bytes) -> None:
    if stream is None:
        return
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a notebook's
        stream.write(text.decode(errors="replace"))
        stream.flush()
        return
    # Not through the stream: its lock would make the exit of this process wait for a stopped terminal.
    left = memoryview(text)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            poller.poll()
