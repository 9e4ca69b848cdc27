"""Files and folders that nobody but this user can read, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path


FILE, FOLDER = 0o600, 0o700


def make_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Make a folder, and those above it that are missing. One that is there keeps its mode.

    Raises:
        OSError: it cannot be made; FileExistsError: it is there, and ``exist_ok`` is not set.
    """
    if not path.parent.is_dir():
        make_folder(path.parent, exist_ok=True)
    try:
        path.mkdir(FOLDER)
    except FileExistsError:
        if not exist_ok or not path.is_dir():
            raise
        return
    path.chmod(FOLDER)


def open_to_append(path: Path) -> int:
    """A descriptor at the end of a file, which is made if it is missing. One that is there keeps its mode."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE)


def write_text(path: Path, text: str) -> None:
    """Write a file in place of what was in it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(path, flags, FILE), "w", encoding="utf-8") as file:
        file.write(text)
