"""A key shared by all processes of one user on one host, in a file that only this user can read.

Used by processes that need a common secret and were given none. The first one creates the key; it is never removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rallypoint.errors import ConfigError

from . import user_folder


_KEY_BYTES: Final = 32
_NAME: Final = "key"


def user_key(where: Sequence[Path] | None = None) -> bytes:
    """Read the user's key, and create it if it is missing.

    Args:
        where: folders to try instead of those in :mod:`.user_folder`.

    Raises:
        ConfigError: none of the folders can be used; gives the reason for each.
    """
    reasons = []
    for folder in where or user_folder.candidates():
        try:
            user_folder.check(folder)
            return _key_in(folder)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
    raise ConfigError(
        "secret",
        None,
        f"this host has no private folder for a key of this user ({'; '.join(reasons)})",
        "remove what is in the way, or give all workers a secret: RALLY_SECRET, secret=...",
    )


def _key_in(folder: Path) -> bytes:
    path = folder / _NAME
    if not os.path.lexists(path):
        # Write another file and link it: the key appears whole, and only one process's file becomes the key.
        own = folder / f"{_NAME}.{os.getpid()}.{secrets.token_hex(8)}"
        fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, secrets.token_bytes(_KEY_BYTES))
            os.close(fd)
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
        finally:
            os.unlink(own)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        key = os.read(fd, _KEY_BYTES + 1)
    finally:
        os.close(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(0, f"others can read or change {_NAME} in it")
    if len(key) != _KEY_BYTES:
        raise PermissionError(0, f"{_NAME} in it has {len(key)} bytes, expected {_KEY_BYTES}")
    return key
