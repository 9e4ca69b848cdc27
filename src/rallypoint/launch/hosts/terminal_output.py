"""What hosts say, on its way to a stream of this terminal.

A thread writes. A terminal that stands still (Ctrl-S, a pager) holds up nobody who reads from the hosts, until a megabyte
waits for it; then it slows down the workers that print, as a pipe does.
"""

from __future__ import annotations

import collections
import os
import select
import threading
from collections.abc import Callable
from typing import Any, TextIO


# As much waits before whoever prints has to.
_ROOM = 1 << 20


class TerminalOutput:
    """Writes to standard output and standard error, in the order in which it is given their parts.

    Args:
        streams: those to be written to; None: it is closed (``2>&-``).
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
        """Block while much is to be written.

        Args:
            no_longer: whether to return although it is; asked again after :meth:`wake`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting < _ROOM or no_longer())

    def wake(self) -> None:
        """Ask those who wait for room again whether they have to."""
        with self._changed:
            self._changed.notify_all()

    def finish(self) -> int:
        """Nothing more will come. Returns a descriptor that becomes readable when all has been written."""
        with self._changed:
            self._no_more = True
            self._changed.notify_all()
        return self._written

    def close(self) -> None:
        """Give the descriptor back, after :meth:`finish`. What could not be written yet is given up."""
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
    """One for both streams where they lead to the same place, so that lines keep their order; else one for each."""
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
    # Not through the stream: its lock would keep the end of this process waiting for a terminal that stands still.
    left = memoryview(text)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            poller.poll()
