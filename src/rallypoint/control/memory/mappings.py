"""The memory of a process from the text of ``/proc/PID/smaps``: totals, and mappings merged by name. Pure."""

from __future__ import annotations

import re
from typing import Any, Final


# How many mappings are returned, the largest first.
MOST: Final = 12
_HEAD: Final = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ (\d+) *(.*)$")
_FIELD: Final = re.compile(r"^(\w+): +(\d+) kB$")
# Fields of a mapping, and their names here.
_FIELDS: Final = {
    "Rss": "rss",
    "Pss": "pss",
    "Shared_Clean": "shared",
    "Shared_Dirty": "shared",
    "Private_Clean": "private",
    "Private_Dirty": "private",
    "Swap": "swap",
    "Shared_Hugetlb": "huge",
    "Private_Hugetlb": "huge",
}
KEYS: Final = ("rss", "pss", "shared", "private", "swap", "huge")
_SHARED_MEMORY: Final = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")  # noqa: S108  names of mappings


def memory(smaps: str) -> dict[str, Any]:
    """The memory of a process.

    Args:
        smaps: the text of ``/proc/PID/smaps``.

    Returns:
        In bytes: ``rss`` (resident), ``pss`` (the same, but a page that n processes share counts 1/n), ``shared`` and ``private``
        (parts of rss), ``swap``, ``huge`` (huge pages, not in rss). ``mappings`` has the :data:`MOST` largest ones by pss, swap
        and huge, merged by name, each with ``name``, ``count`` and the same keys. ``shared_memory`` has the :data:`MOST` largest
        objects in ``/dev/shm``, memory files, System V segments and shared mappings of ``/dev/zero``.
    """
    totals = dict.fromkeys(KEYS, 0)
    named: dict[str, dict[str, Any]] = {}
    current: dict[str, Any] = {}
    for line in smaps.splitlines():
        if head := _HEAD.match(line):
            name = _name(head[1], int(head[2]), head[3])
            current = named.setdefault(name, {"name": name, "count": 0, **dict.fromkeys(KEYS, 0)})
            current["count"] += 1
        elif (found := _FIELD.match(line)) and found[1] in _FIELDS and current:
            key, value = _FIELDS[found[1]], int(found[2]) * 1024
            current[key] += value
            totals[key] += value
    largest = sorted(named.values(), key=_size, reverse=True)
    shared = [each for each in largest if each["name"].startswith(_SHARED_MEMORY)]
    return {
        **totals,
        "mappings": [each for each in largest if _size(each)][:MOST],
        "shared_memory": [each for each in shared if _size(each)][:MOST],
    }


def _name(access: str, inode: int, path: str) -> str:
    deleted = " (deleted)"
    path = path.removesuffix(deleted)
    if path.startswith("/dev/zero"):
        return "/dev/zero (shared between a process and its forks)"
    if path:
        return path
    return "anonymous, shared" if access.endswith("s") and inode else "anonymous"


def _size(mapping: dict[str, Any]) -> int:
    size: int = mapping["pss"] + mapping["swap"] + mapping["huge"]
    return size
