"""How a supervisor's failure report gets to the terminal's host: through a file without a name."""

from __future__ import annotations

import os

from rallypoint._core import env as environment


VARIABLE = "RALLY_REPORT_FD"


def make() -> int:
    """A file for the report, to be inherited."""
    return os.memfd_create("rally-report", 0)


def read(fd: int) -> str:
    """What the supervisor has written."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


def inherited() -> int | None:
    """The file that this supervisor was given; workers are not to see it."""
    text = environment.process_environment().pop(VARIABLE, None)
    if text is None:
        return None
    fd = int(text)
    os.set_inheritable(fd, False)
    return fd


def write(fd: int, report: str) -> None:
    with os.fdopen(fd, "wb") as file:
        file.write(report.encode(errors="replace"))
