"""Where the user sees output: file descriptors, or the text streams of a notebook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rallypoint._core.whole_writes import write_whole


@dataclass(frozen=True, slots=True)
class Console:
    """The console: two descriptors, or functions that write to text streams (in notebooks).

    Args:
        write_out: receives workers' stdout as bytes, if the user does not see descriptor 1.
        write_err: the same for stderr.
    """

    stdout_fd: int = 1
    stderr_fd: int = 2
    write_out: Callable[[bytes], None] | None = None
    write_err: Callable[[bytes], None] | None = None

    def writer(self, *, out: bool) -> Callable[[bytes], None]:
        """The function that writes to stdout (``out``) or to stderr."""
        if out:
            return self.write_out or fd_writer(self.stdout_fd)
        return self.write_err or fd_writer(self.stderr_fd)

    @classmethod
    def of_streams(cls, stdout: TextIO, stderr: TextIO) -> Console:
        """The console of a program whose ``sys.stdout`` may not be descriptor 1, as in a notebook."""
        return cls(
            write_out=None if _is_fd(stdout, 1) else _text_writer(stdout),
            write_err=None if _is_fd(stderr, 2) else _text_writer(stderr),
        )


def _is_fd(stream: TextIO, fd: int) -> bool:
    try:
        return stream.fileno() == fd
    except (OSError, ValueError, AttributeError):
        return False


def _text_writer(stream: TextIO) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        stream.write(data.decode(errors="replace"))
        stream.flush()

    return write


def fd_writer(fd: int) -> Callable[[bytes], None]:
    """A function that writes all of its data to ``fd``."""
    return lambda data: write_whole(fd, data)
