"""How a supervisor's failure report, and what happened to hosts, reach the terminal's host: through an unnamed file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint._core import env as environment, linux


VARIABLE = "RALLY_REPORT_FD"


def make() -> int:
    """A file for the report, to be inherited."""
    return linux.memfd_create("rally-report", 0)


@dataclass(frozen=True, slots=True)
class HostEnd:
    """What a host's supervisor leaves behind.

    Args:
        report: as text; empty if the job did not fail.
        troubles: what happened to hosts, as records.
    """

    report: str = ""
    troubles: Sequence[dict[str, str]] = ()


def read(fd: int) -> HostEnd:
    """What the supervisor has written; nothing if it was killed."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        data = file.read()
    try:
        record = json.loads(data)
    except ValueError:
        return HostEnd()
    return HostEnd(record["report"], tuple(record["troubles"]))


def inherited() -> int | None:
    """The file that this supervisor was given; workers must not see it."""
    text = environment.process_environment().pop(VARIABLE, None)
    if text is None:
        return None
    fd = int(text)
    os.set_inheritable(fd, False)
    return fd


def write(fd: int, end: HostEnd) -> None:
    record = {"report": end.report, "troubles": list(end.troubles)}
    with os.fdopen(fd, "wb") as file:
        file.write(json.dumps(record).encode())
