"""Groups of processes with the same stack, the odd ones out first. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint._core.rank_words import in_words
from rallypoint.control.collectives import collective_waits


Process = Mapping[str, Any]

# Where packages and Python's own modules are.
_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+)/")
# Names of C++ functions with their template arguments can fill pages.
_MAX_FUNCTION = 100


def groups(processes: Sequence[Process], *, all_threads: bool = False) -> list[list[Process]]:
    """Groups of processes whose main threads have the same stack, the smallest group first.

    Args:
        processes: records of :meth:`.RunningJob.stacks`.
        all_threads: the other threads must have the same stacks, too, in any order.
    """
    found: dict[Any, list[Process]] = {}
    for each in processes:
        found.setdefault(_signature(each, all_threads), []).append(each)
    # A child's stack means nothing if its parent works, so workers come first.
    return sorted(
        found.values(), key=lambda group: (bool(group[0]["name"]), len(group), group[0]["rank"])
    )


def _signature(process: Process, all_threads: bool) -> Any:
    threads = process["threads"]
    kind = bool(process["name"])
    if not threads:
        return kind, process["why"]
    main, *others = (tuple((f["file"], f["line"]) for f in each["frames"]) for each in threads)
    return kind, main, tuple(sorted(others)) if all_threads else ()


def text(processes: Sequence[Process], *, all_threads: bool = False) -> str:
    """A text for people: each group under its ranks, the stack as in a traceback.

    Args:
        all_threads: show all threads; otherwise those besides the main thread are only counted.
    """
    parts = []
    for group in groups(processes, all_threads=all_threads):
        first = group[0]
        lines = [_title(group)]
        if not first["threads"]:
            lines.append(f"    no stack: {first['why']}")
        for thread in first["threads"] if all_threads else first["threads"][:1]:
            if thread is not first["threads"][0]:
                lines.append(f"  thread {thread['name']}".rstrip() + ":")
            lines += [_frame(each) for each in thread["frames"]] or ["    (no Python frame)"]
        others = len(first["threads"]) - 1
        if others > 0 and not all_threads:
            lines.append(f"    (and {others} other thread{'s' if others > 1 else ''})")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _title(group: Sequence[Process]) -> str:
    first = group[0]
    if first["name"]:
        owners = ", ".join(f"{each['name']} {each['pid']} of rank {each['rank']}" for each in group)
        return f"{owners}:"
    ranks = in_words([each["rank"] for each in group])
    places = {collective_waits.place(each.get("collectives") or ()) for each in group}
    where = f", in {places.pop()}" if len(places) == 1 and "" not in places else _place(first)
    pids = ""
    if len(group) == 1:
        host = f" on {first['host']}" if first.get("host") else ""
        pids = f" (pid {first['pid']}{host})"
    return f"{ranks}{pids}{where}:"


def _place(process: Process) -> str:
    frames = process["threads"][0]["frames"] if process["threads"] else []
    if not frames:
        return ""
    return f", in {frames[-1]['function']}"


def _frame(frame: Mapping[str, Any]) -> str:
    file = _INSTALLED.sub("", frame["file"])
    line = f":{frame['line']}" if frame["line"] else ""  # C code has none
    function = frame["function"]
    if len(function) > _MAX_FUNCTION:
        function = function[: _MAX_FUNCTION - 1] + "…"
    return f"    {file}{line} in {function}"
