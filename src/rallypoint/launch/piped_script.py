"""A script that comes through stdin: ``rally run - <train.py``, a here-document, a pipe.

Every worker reads all of it, also after a restart. A pipe would give it to one of them, once: the others would run nothing, and
succeed.
"""

from __future__ import annotations

import os
import shutil
import stat

from rallypoint._core import linux
from rallypoint.errors import ConfigError

from .config import Job, TargetKind


AS_IN_PYTHON = "-"
PLACE = "/dev/stdin"


def is_named(name: str) -> bool:
    """Whether the script of this name comes through stdin."""
    return name in {AS_IN_PYTHON, PLACE}


def check(name: str) -> None:
    """Check that there may be a script in stdin.

    Raises:
        ConfigError: there is none.
    """
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        raise ConfigError("script", name, "stdin is closed", "name a file") from None
    if stat.S_ISCHR(mode) and not os.isatty(0):
        raise ConfigError("script", name, "stdin is empty (/dev/null)", "name a file")


def keep(job: Job) -> None:
    """Read such a script, and have stdin be a file in memory that holds it. Only its end is left to read from stdin itself."""
    if job.kind is not TargetKind.SCRIPT or not is_named(job.name):
        return
    if stat.S_ISREG(os.fstat(0).st_mode):
        if job.name == AS_IN_PYTHON:
            os.lseek(0, 0, os.SEEK_END)
        return
    kept = linux.memfd_create("rally-script")
    with open(0, "rb", closefd=False) as source, open(kept, "wb") as file:
        shutil.copyfileobj(source, file)
        file.flush()
        os.dup2(kept, 0)
