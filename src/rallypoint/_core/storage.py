"""A place for files: a directory, or a URL that fsspec understands.

fsspec comes with torch. It is imported for URLs only; the user must install what else a scheme needs (s3fs, gcsfs, …).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast


class Storage(Protocol):
    """Files by their path below one root. Every method may raise OSError, or what the driver of a URL raises."""

    def __str__(self) -> str:
        """The root, as the user wrote it."""

    def make(self, folder: str) -> None:
        """Make a folder, and all folders above it; it may exist."""

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder; none if there is no such folder."""

    def read(self, path: str) -> bytes:
        """A whole file."""

    def size(self, path: str) -> int:
        """Bytes of a file."""

    def open(self, path: str, mode: str) -> BinaryIO:
        """A file, for reading (``rb``) or writing (``wb``)."""

    def sync(self, file: BinaryIO) -> None:
        """Make what was written reach the disk, before the file is closed."""

    def put(self, path: str, data: bytes) -> None:
        """Write a file that others see whole or not at all."""

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""

    def rename(self, path: str, new: str) -> None:
        """Rename a file."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that it holds. It need not exist."""


class Directory:
    """A directory of this host."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._given = os.fspath(root)
        self._root = Path(self._given).absolute()

    def __str__(self) -> str:
        return self._given

    def make(self, folder: str) -> None:
        (self._root / folder).mkdir(parents=True, exist_ok=True)

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))
        except FileNotFoundError:
            return []

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    def open(self, path: str, mode: str) -> BinaryIO:
        return cast("BinaryIO", (self._root / path).open(mode))

    def sync(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def put(self, path: str, data: bytes) -> None:
        target = self._root / path
        # Sync the files beside it first, then the file, then its name: no power cut can leave a record without them.
        _sync_folder(target.parent)
        temporary = target.with_name(target.name + ".tmp")
        with temporary.open("wb") as file:
            file.write(data)
            self.sync(file)
        temporary.replace(target)
        _sync_folder(target.parent)
        _sync_folder(target.parent.parent)

    def exists(self, path: str) -> bool:
        return (self._root / path).exists()

    def rename(self, path: str, new: str) -> None:
        (self._root / path).replace(self._root / new)

    def remove(self, path: str) -> None:
        target = self._root / path
        try:
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()
        except FileNotFoundError:
            pass


class Remote:
    """The storage that a URL names.

    Raises:
        ValueError: no driver knows its scheme.   ImportError: the driver is not installed.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._given = url
        self._fs: Any
        self._fs, root = url_to_fs(url)
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return self._given

    def make(self, folder: str) -> None:
        self._fs.makedirs(self._at(folder), exist_ok=True)

    def names(self, folder: str = "") -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted({str(each).rstrip("/").rpartition("/")[2] for each in found})

    def read(self, path: str) -> bytes:
        return bytes(self._fs.cat_file(self._at(path)))

    def size(self, path: str) -> int:
        return int(self._fs.size(self._at(path)))

    def open(self, path: str, mode: str) -> BinaryIO:
        return cast("BinaryIO", self._fs.open(self._at(path), mode))

    def sync(self, file: BinaryIO) -> None:
        """Do nothing: drivers upload a file when it is closed."""

    def put(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(self._at(path), data)

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(self._at(path)))

    def rename(self, path: str, new: str) -> None:
        self._fs.mv(self._at(path), self._at(new))

    def remove(self, path: str) -> None:
        try:
            self._fs.rm(self._at(path), recursive=True)
        except FileNotFoundError:
            pass

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def storage_at(where: str | os.PathLike[str]) -> Storage:
    """The storage that a path or a URL names.

    Raises:
        ValueError: no driver knows the URL's scheme.   ImportError: its driver is not installed.
    """
    text = os.fspath(where)
    scheme, found, rest = text.partition("://")
    if found and scheme in ("file", "local"):
        return Directory(rest)
    return Remote(text) if found else Directory(text)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError:
        pass  # some network filesystems refuse it
    finally:
        os.close(fd)
