"""Files and folders that only this user can read, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path


FILE, FOLDER = 0o600, 0o700


def make_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Create a folder and its missing parents. Existing folders keep their mode.

    Raises:
        OSError: it cannot be created; FileExistsError: it exists, and ``exist_ok`` is not set.
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
    """Open a file for appending, and create it if missing. Returns the descriptor. Existing files keep their mode."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE)


def write_text(path: Path, text: str) -> None:
    """Write a file, replacing its content."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(path, flags, FILE), "w", encoding="utf-8") as file:
        file.write(text)
