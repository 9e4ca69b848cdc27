"""The workers' memory, as text for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rallypoint._core.rank_words import in_words
from rallypoint.control.tables.worker_table import size


Process = Mapping[str, Any]

_HEAD: Final = ("RANK", "HOST", "PID", "PROCESS", "RSS", "PSS", "PRIVATE", "SHARED", "SWAP", "")
_LEFT: Final = {1, 3, len(_HEAD) - 1}
# How many mappings are shown per rank.
_SHOWN: Final = 5


def text(processes: Sequence[Process], *, mappings: int = _SHOWN) -> str:
    """A table of all processes; the workers' largest mappings; shared memory; devices.

    Args:
        mappings: how many mappings to show per rank.
    """
    parts = [_table(processes), *_mappings(processes, mappings)]
    parts += filter(None, (_shared_memory(processes), _devices(processes)))
    return "\n\n".join(parts)


def _table(processes: Sequence[Process]) -> str:
    rows = [_HEAD, *(_row(each) for each in processes)]
    hosts = {each["host"] for each in processes}
    for host in sorted(hosts):
        here = [each for each in processes if each["host"] == host]
        if len(here) > 1:
            pss, private = (sum(each[key] for each in here) for key in ("pss", "private"))
            swap = sum(each["swap"] for each in here)
            rows.append(("all", host, "", "", "", size(pss), size(private), "", size(swap), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(each: Process) -> tuple[str, ...]:
    numbers = [size(each[key]) for key in ("rss", "pss", "private", "shared", "swap")]
    if each["why"]:
        numbers = ["-"] * len(numbers)
    name = each["name"] or "worker"
    return (str(each["rank"]), each["host"], str(each["pid"]), name, *numbers, each["why"])


def _mappings(processes: Sequence[Process], most: int) -> list[str]:
    """The largest mappings of each worker. Ranks whose mappings have the same names and sizes share an entry."""
    groups: dict[str, list[int]] = {}
    for each in processes:
        if each["name"] or not each["mappings"]:
            continue
        shown = "\n".join(
            f"  {size(one['pss'] + one['swap'] + one['huge']):>6}  {_called(one)}"
            for one in each["mappings"][:most]
        )
        groups.setdefault(shown, []).append(each["rank"])
    return [f"{in_words(ranks)}, largest mappings:\n{shown}" for shown, ranks in groups.items()]


def _called(mapping: Mapping[str, Any]) -> str:
    count = f" ({mapping['count']} mappings)" if mapping["count"] > 1 else ""
    swap = f", {size(mapping['swap'])} of it swapped out" if mapping["swap"] else ""
    return f"{mapping['name']}{count}{swap}"


def _shared_memory(processes: Sequence[Process]) -> str:
    """Objects that processes share, each listed once, with the ranks that map it."""
    found: dict[tuple[str, str], tuple[int, set[int]]] = {}
    for each in processes:
        for one in each["shared_memory"]:
            total, ranks = found.get((each["host"], one["name"]), (0, set()))
            found[each["host"], one["name"]] = total + one["pss"], {*ranks, each["rank"]}
    if not found:
        return ""
    ordered = sorted(found.items(), key=lambda each: -each[1][0])
    lines = [
        f"  {size(total):>6}  {name} ({in_words(ranks)})"
        for (_, name), (total, ranks) in ordered[:10]
    ]
    more = f"\n  (and {len(ordered) - 10} more)" if len(ordered) > 10 else ""
    return "shared memory:\n" + "\n".join(lines) + more


def _devices(processes: Sequence[Process]) -> str:
    lines = [
        f"  rank {each['rank']}, {one['device']}: {size(one['allocated'])} allocated (at most"
        f" {size(one['most_allocated'])}), {size(one['reserved'])} reserved in {one['segments']} segments;"
        f" {size(one['free'])} of them free, {size(one['largest_free'])} in one piece"
        for each in processes
        for one in each["devices"]
    ]
    return "devices, by torch's allocator:\n" + "\n".join(lines) if lines else ""
