"""Reads log files from a given place on, even while they grow and are rotated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rallypoint._core.log_folder import LogFile
from rallypoint._core.log_records import Line, parse


# A place in a part of a file: the part's inode, and the offset of the first unread line.
Place = tuple[int, int]
CHUNK = 1 << 20


def read(file: LogFile, place: Place | None, limit: int = CHUNK) -> tuple[list[Line], Place | None]:
    """The complete lines from a place on.

    Args:
        file: the file to read.
        place: where to start; None: the beginning. If that part is gone, starts at the oldest part that is left.
        limit: the most bytes to read; a longer line is read in pieces.
    Returns:
        The lines, and where to continue. If that is the same place, there are no more lines now.
    """
    parts = [(each, inode) for each in file.parts() if (inode := _inode(each)) is not None]
    at = next((at for at, (_, inode) in enumerate(parts) if place and inode == place[0]), None)
    if at is None:
        if not parts:
            return [], place
        at, place = 0, (parts[0][1], 0)
    assert place is not None
    path, inode = parts[at]
    try:
        with path.open("rb") as opened:
            if os.fstat(opened.fileno()).st_ino != inode:
                return [], place  # rotated just now: look again
            opened.seek(place[1])
            data = opened.read(limit)
    except FileNotFoundError:
        return [], place
    end = data.rfind(b"\n") + 1
    if not end and (len(data) == limit or at + 1 < len(parts)):
        end = len(data)
    lines = [parse(each, file.origin) for each in data[:end].removesuffix(b"\n").split(b"\n")]
    following: Place = (inode, place[1] + end)
    if end == len(data) < limit and at + 1 < len(parts):
        following = (parts[at + 1][1], 0)
    return (lines if end else []), following


def rest(file: LogFile, place: Place | None) -> list[Line]:
    """An unterminated last line, once nothing is written any more."""
    if place is None or _inode(file.path) != place[0]:
        return []
    with file.path.open("rb") as opened:
        opened.seek(place[1])
        data = opened.read(CHUNK)
    return [parse(data, file.origin)] if data else []


def end_of(file: LogFile, size: int) -> Place | None:
    """The place of the first line that starts in the last ``size`` bytes of the newest part."""
    try:
        with file.path.open("rb") as opened:
            stat = os.fstat(opened.fileno())
            begin = max(0, stat.st_size - size)
            if begin:
                opened.seek(begin)
                begin += opened.read(size).find(b"\n") + 1
            return stat.st_ino, begin
    except FileNotFoundError:
        return None


def every_line(file: LogFile, place: Place | None = None) -> Iterator[Line]:
    """All lines written so far, from a place on."""
    while True:
        lines, following = read(file, place)
        yield from lines
        if following == place:
            yield from rest(file, place)
            return
        place = following


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
