"""Pseudo-terminals, so that a worker's progress bars and colours stay if its output is shown on a terminal."""

from __future__ import annotations

import fcntl
import os
import termios


def pseudo_terminal(like: int) -> tuple[int, int]:
    """A pseudo-terminal that passes bytes unchanged and has the size of the real one: (ours, the worker's)."""
    ours, theirs = os.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # the real terminal turns newlines into what it needs
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    take_size(ours, like)
    return ours, theirs


def take_size(terminal: int, like: int) -> None:
    """Give a pseudo-terminal the size of the real one."""
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, b"\0" * 8))
    except OSError:
        pass  # no size known: programs then assume 80 columns
