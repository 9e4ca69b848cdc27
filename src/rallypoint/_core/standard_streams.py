"""What a command prints: in any encoding, and wherever it goes.

``rally … | head`` ends the reader, a disk is full, ``LC_ALL=de_DE.ISO-8859-1`` has no ``│``: none of these is worth a traceback,
and none changes the exit code of a job.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Mapping

from rallypoint.errors import RallyError


# Replacements for characters that an encoding may lack; all others are escaped.
_PLAIN = dict(zip("│├└─━╸…→·µ", ("|", "|", "`", "-", "=", "-", "...", "->", "-", "u"), strict=True))
# The name by which Python finds :func:`_in_plain`.
PLAIN = "rallypoint.plain"

# Types of terminals (``TERM``) that cannot move the cursor: Emacs's shell, some consoles of CI; and those that tell nothing.
DUMB = ("", "dumb")


class ReaderGone(RallyError):
    """Nobody reads what is printed."""


def set_up() -> None:
    """From now on, print what the encoding of stdout and stderr lacks as the nearest ASCII."""
    codecs.register_error(PLAIN, _in_plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # This takes effect before it fails to find its position in the file, if that has become a pipe (dup2).
            with contextlib.suppress(OSError):
                stream.reconfigure(errors=PLAIN)


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    plain = (
        _PLAIN.get(each) or each.encode("ascii", "backslashreplace").decode() for each in lacking
    )
    return "".join(plain), error.end


def encoding() -> str:
    """The encoding of stderr, for text written past Python's stream, with :data:`PLAIN` for what it lacks."""
    codecs.register_error(PLAIN, _in_plain)
    return getattr(sys.stderr, "encoding", None) or "utf-8"


def has_colour(fd: int, env: Mapping[str, str]) -> bool:
    """Whether a stream shows colours, and the user wants them."""
    return os.isatty(fd) and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def write(text: str, *, flush: bool = True) -> None:
    """Write to stdout.

    Args:
        text: with its newlines.
        flush: do so at once. Otherwise a later call may raise.

    Raises:
        ReaderGone: the other end of the pipe is closed.
        RallyError: it cannot be written, because the disk is full, say.
    """
    if sys.stdout is None:  # 1>&-
        return
    try:
        sys.stdout.write(text)
        if flush:
            sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone("nobody reads stdout") from None
    except OSError as error:
        raise RallyError(f"cannot write to stdout: {error.strerror or error}") from None


def say(text: str) -> None:
    """A line on stderr. What cannot be written is lost: there is nobody to tell."""
    if sys.stderr is None:  # 2>&-
        return
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        pass


def settle() -> None:
    """Write what is left; drop it if that fails. Python would otherwise exit with code 120, whatever the command's own is."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            # It stays in the buffer, for Python's own attempt at the very end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
