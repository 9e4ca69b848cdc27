"""Where a person looks: descriptors, or the text streams of a notebook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rallypoint._core.whole_writes import write_whole


@dataclass(frozen=True, slots=True)
class Console:
    """Where the console is: descriptors, or with text streams (notebooks) functions to write to.

    Args:
        write_out: gets bytes of workers' stdout, if descriptor 1 is not what the user sees.
        write_err: the same for stderr.
    """

    stdout_fd: int = 1
    stderr_fd: int = 2
    write_out: Callable[[bytes], None] | None = None
    write_err: Callable[[bytes], None] | None = None

    def writer(self, *, out: bool) -> Callable[[bytes], None]:
        """What writes to its stdout (``out``) or its stderr."""
        if out:
            return self.write_out or fd_writer(self.stdout_fd)
        return self.write_err or fd_writer(self.stderr_fd)

    @classmethod
    def of_streams(cls, stdout: TextIO, stderr: TextIO) -> Console:
        """For a program whose ``sys.stdout`` may not be descriptor 1, as in a notebook."""
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
    """Writes to a descriptor, all of it."""
    return lambda data: write_whole(fd, data)
