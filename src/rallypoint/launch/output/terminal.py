"""Pseudo-terminals: they keep workers' progress bars and colours if the output goes to a terminal."""

from __future__ import annotations

import fcntl
import os
import termios


def pseudo_terminal(like: int) -> tuple[int, int]:
    """Open a pseudo-terminal of the real one's size that passes bytes unchanged: (our end, the worker's)."""
    ours, theirs = os.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # the real terminal translates newlines
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    take_size(ours, like)
    return ours, theirs


def take_size(terminal: int, like: int) -> None:
    """Give a pseudo-terminal the size of the real one."""
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, b"\0" * 8))
    except OSError:
        pass  # size unknown: programs assume 80 columns
