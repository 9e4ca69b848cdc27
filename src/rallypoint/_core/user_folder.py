"""A folder on this host that only this user can enter: for sockets and keys that all processes of the user find."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


def candidates() -> tuple[Path, Path]:
    """The candidate folders, in order. They do not depend on the environment, so all processes agree."""
    uid = os.geteuid()
    # The second exists only while the user is logged in, but no other user can create it.
    return Path(f"/tmp/rallypoint-{uid}"), Path(f"/run/user/{uid}/rallypoint")  # noqa: S108  # checked below


def check(folder: Path) -> None:
    """Create the folder, or check that it is this user's and private.

    Raises:
        OSError: it cannot be created, or is not private.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, "not a folder", str(folder))
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"belongs to uid {found.st_uid}", str(folder))
    if stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"its mode is {stat.S_IMODE(found.st_mode):04o}, expected 0700"
        raise PermissionError(errno.EPERM, problem, str(folder))
