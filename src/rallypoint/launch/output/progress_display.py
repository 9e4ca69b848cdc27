"""Shows the progress of a job: as a bar in the last row of the terminal, or as a line now and then.

Workers write to the terminal themselves, so a bar cannot be kept between their lines. It has a row of its own: the
terminal is told to scroll only the rows above it (DECSTBM, which terminals have had since the VT100), as apt does.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rallypoint._core import standard_streams
from rallypoint.control.tables import step_words

from .console import Console


# Seconds between two updates of a bar.
BAR_INTERVAL = 0.5
# Seconds until the first line. Each later pause is twice as long as the one before, up to a limit.
FIRST_LINE, LAST_LINE = 30.0, 600.0
# A terminal with fewer rows has none to spare.
LEAST_ROWS = 5


class Display(Protocol):
    """Shows progress."""

    interval: float

    def show(self, progress: Mapping[str, Any]) -> None:
        """Show a record of progress. Never blocks."""

    def close(self) -> None:
        """Leave no trace."""


def choose(wanted: str, console: Console, say: Callable[[str], None], terminal: str) -> Display:
    """The display for a job.

    Args:
        wanted: ``auto`` or ``lines``.
        console: where the user looks.
        say: prints a line for the user.
        terminal: its type, as in ``TERM``.
    """
    is_terminal = console.write_err is None and os.isatty(console.stderr_fd)
    if wanted == "auto" and is_terminal and terminal not in standard_streams.DUMB:
        return Bar(console.stderr_fd)
    return Lines(say)


class Lines:
    """A line now and then.

    Args:
        say: prints it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: int | None = None
        self.interval = FIRST_LINE

    def show(self, progress: Mapping[str, Any]) -> None:
        if self._last is None:
            self._last = -1  # it has just begun
            return
        self.interval = min(2 * self.interval, LAST_LINE)
        if progress["step"] != self._last:
            self._last = progress["step"]
            self._say(step_words.long(progress))

    def close(self) -> None:
        pass


class Bar:
    """A bar in the last row of a terminal.

    Args:
        fd: the terminal.
    """

    def __init__(self, fd: int) -> None:
        self.interval = BAR_INTERVAL
        self._fd = fd
        self._encoding = standard_streams.encoding()
        self._size: tuple[int, int] | None = None  # the size for which the last row is reserved

    def show(self, progress: Mapping[str, Any]) -> None:
        rows, columns = self._look()
        if rows < LEAST_ROWS or not self._is_ours():
            return
        reserve = ""
        if self._size != (rows, columns):
            # Down and up again: the cursor must not stand in the last row. Setting the region moves it.
            reserve = f"\x1bD\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A"
        text = step_words.bar(progress, columns - 1)
        if self._write(f"{reserve}\x1b7\x1b[{rows};1H{text}\x1b[K\x1b8"):
            self._size = rows, columns

    def close(self) -> None:
        if self._size is not None:
            self._write(f"\x1b7\x1b[r\x1b[{self._size[0]};1H\x1b[K\x1b8")
            self._size = None

    def _look(self) -> tuple[int, int]:
        try:
            answer = fcntl.ioctl(self._fd, termios.TIOCGWINSZ, bytes(8))
        except OSError:  # the terminal is gone
            return 0, 0
        rows, columns, _, _ = struct.unpack("4H", answer)
        return rows, columns

    def _is_ours(self) -> bool:
        """Whether this job is in the foreground of the terminal."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def _write(self, text: str) -> bool:
        """Write in one call, so that nothing comes in between, unless it would block: after Ctrl-S the terminal takes nothing."""
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        try:
            if not any(event & select.POLLOUT for _, event in poller.poll(0)):
                return False
            os.write(self._fd, text.encode(self._encoding, standard_streams.PLAIN))
        except OSError:
            return False
        return True
