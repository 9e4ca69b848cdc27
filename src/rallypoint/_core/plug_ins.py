"""Entry points of installed packages."""

from __future__ import annotations

import glob
import os
import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def declared(group: str) -> list[EntryPoint]:
    """The entry points of a group, sorted by name; imports none. Not cached, because packages may change.

    Importing importlib.metadata takes 50 ms, so it is done only if a file mentions the group.
    """
    if not any(_mentioned(group, folder) for folder in dict.fromkeys(sys.path)):
        return []
    from importlib.metadata import entry_points

    return sorted(entry_points(group=group), key=lambda each: (each.name, each.value))


def where(point: EntryPoint) -> str:
    """Describe an entry point and its distribution, for errors."""
    distribution = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
    return f"entry point {point.name} = {point.value} of distribution {distribution}"


def _mentioned(group: str, folder: str) -> bool:
    pattern = os.path.join(glob.escape(folder or "."), "*-info", "entry_points.txt")
    for path in glob.iglob(pattern):
        try:
            with open(path, "rb") as file:
                if group.encode() in file.read():
                    return True
        except OSError:
            pass  # removed meanwhile
    return False
