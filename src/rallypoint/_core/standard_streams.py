"""What a command writes for its user: the streams may be closed, a pipe that nobody reads, or a file on a full disk."""

from __future__ import annotations

import sys

from rallypoint.errors import RallyError


def say(text: str) -> None:
    """A line on stderr. What cannot be written is lost: there is nobody to be told."""
    if sys.stderr is None:  # 2>&-
        return
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        pass


def show(text: str, *, end: str = "\n", flush: bool = True) -> bool:
    """Text on stdout.

    Returns:
        Whether anybody may read more of it: not after ``| head`` has ended.

    Raises:
        RallyError: it cannot be written.
    """
    if sys.stdout is None:  # >&-
        return False
    try:
        print(text, end=end, flush=flush)  # noqa: T201
    except BrokenPipeError:
        return False
    except OSError as error:
        raise RallyError(f"cannot write to stdout: {error.strerror}") from None
    return True


def settle() -> None:
    """At the command's end: what cannot be written does not change its exit code.

    Python exits with 120 if it cannot write what its streams still hold.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            setattr(sys, name, None)
