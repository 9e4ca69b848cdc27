"""What torch's flight recorder knows about a rank's collectives, in a few records. Pure.

torch records the last collectives of all process groups (``TORCH_FR_BUFFER_SIZE`` of them, 2000 by default): NCCL's
and, from torch 2.13 on, Gloo's. Point-to-point calls over Gloo are not among them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final


# How many completed calls of each group are kept, and how many calls in all: a rank may have many under way.
_DONE, _MOST = 3, 16
# The most that a record may hold: it comes from another process, maybe on another host.
_MAX_TEXT: Final = 200
_MAX_SIZES: Final = 64

Group = Mapping[str, Any]
Entered = Mapping[str, Any]


def compact(
    dumps: Sequence[bytes | str], ranks: Mapping[str, Sequence[int]], now_ns: int, at: str = ""
) -> list[Group]:
    """The last calls of each group.

    Args:
        dumps: what torch's recorders hold, as JSON; NCCL has a recorder of its own.
        ranks: by the name of a group, the global ranks of its members, in order.
        now_ns: the wall clock of the recorded process, in nanoseconds.
        at: where the main thread is, in words.

    Returns:
        For each group and backend: ``name``, ``about`` (torch's ``group_desc``), ``ranks``, and ``calls`` in order, each with
        ``seq``, ``op``, ``sizes`` (of its inputs), ``dtype``, ``done``, ``seconds`` since it started, and ``at`` if not done.
    """
    entries = [each for dump in dumps for each in json.loads(dump).get("entries") or ()]
    groups: dict[str, dict[str, Any]] = {}
    for each in entries:
        if each["is_p2p"]:
            continue
        group_name, about = each["process_group"]
        backend, _, op = each["profiling_name"].rpartition(":")
        name = f"{group_name} {backend}"  # each backend of a group counts its own calls
        members = list(ranks.get(group_name, ()))
        group = groups.setdefault(
            name, {"name": name, "about": about, "ranks": members, "calls": []}
        )
        sizes = each["input_sizes"] or each["output_sizes"]
        dtypes = each["input_dtypes"] or each["output_dtypes"] or [""]
        calls = group["calls"]
        if calls and each["collective_seq_id"] < calls[-1]["seq"]:
            calls.clear()  # of a destroyed group: another one has its name, and starts counting again
        calls.append(
            {
                "seq": each["collective_seq_id"],
                "op": op[:_MAX_TEXT],
                "sizes": sizes[:_MAX_SIZES],
                "dtype": dtypes[0],
                "done": bool(each["retired"]),
                "at": "" if each["retired"] else at[:_MAX_TEXT],
                "seconds": max(0.0, (now_ns - each["time_created_ns"]) / 1e9),
            }
        )
    for group in groups.values():
        calls = sorted(group["calls"], key=lambda call: call["seq"])
        pending = [call for call in calls if not call["done"]]
        done = [call for call in calls if call["done"]]
        group["calls"] = sorted(
            done[-_DONE:] + pending[: _MOST - _DONE], key=lambda call: call["seq"]
        )
    return list(groups.values())


def entered(
    dumps: Sequence[bytes | str], ranks: Mapping[str, Sequence[int]], most: int
) -> list[Entered]:
    """When a rank entered the last calls of each group.

    Args:
        dumps, ranks: as for :func:`compact`.
        most: the most calls, in all groups together.

    Returns:
        For each group and backend with more than one member: ``name``, ``ranks``, and in order of the calls ``seqs``, ``times``
        (microseconds since the first of them, which was at ``since``, in nanoseconds of the host's wall clock) and ``kinds``
        (calls of the same operation and sizes have the same kind).
    """
    calls: dict[str, list[tuple[int, int, int]]] = {}
    members: dict[str, list[int]] = {}
    for dump in dumps:
        for each in json.loads(dump).get("entries") or ():
            group = each["process_group"][0]
            if each["is_p2p"] or len(ranks.get(group, ())) < 2:
                continue
            backend, _, op = each["profiling_name"].rpartition(":")
            name = f"{group} {backend}"
            members[name] = list(ranks[group])
            kind = zlib.crc32(repr((op, each["input_sizes"], each["input_dtypes"])).encode())
            call = each["collective_seq_id"], each["time_created_ns"], kind
            so_far = calls.setdefault(name, [])
            if so_far and call[0] < so_far[-1][0]:
                so_far.clear()  # as above
            so_far.append(call)
    found: list[Entered] = []
    for name, all_of in calls.items():
        last = sorted(all_of)[-max(1, most // len(calls)) :]
        since = last[0][1]
        found.append(
            {
                "name": name,
                "ranks": members[name],
                "since": since,
                "seqs": [seq for seq, _, _ in last],
                "times": [(at - since) // 1000 for _, at, _ in last],
                "kinds": [kind for _, _, kind in last],
            }
        )
    return found


def are_entered(groups: object) -> bool:
    """Whether this is what :func:`entered` returns."""
    return isinstance(groups, list) and all(map(_is_entered, groups))


def _is_entered(group: object) -> bool:
    if not isinstance(group, dict) or type(group.get("since")) is not int:
        return False
    columns = [group.get(name) for name in ("seqs", "times", "kinds")]
    return (
        isinstance(group.get("name"), str)
        and _are_numbers(group.get("ranks"))
        and all(map(_are_numbers, columns))
        and len({len(each) for each in columns if isinstance(each, list)}) == 1
    )


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(each) is int for each in values)


def begun(statuses: Sequence[bytes | str]) -> int:
    """How many collectives a rank has started, in all groups together.

    Args:
        statuses: what torch's recorders hold, without the calls, as JSON.
    """
    groups = [
        each for text in statuses for each in (json.loads(text).get("pg_status") or {}).values()
    ]
    return sum(max(0, int(each["last_enqueued_collective"])) for each in groups)


def are_valid(groups: object) -> bool:
    """Whether this is what :func:`compact` returns."""
    return isinstance(groups, list) and all(map(_is_group, groups))


def _is_group(group: object) -> bool:
    return (
        isinstance(group, dict)
        and isinstance(group.get("name"), str)
        and isinstance(group.get("about"), str)
        and isinstance(group.get("ranks"), list)
        and all(type(rank) is int for rank in group["ranks"])
        and isinstance(group.get("calls"), list)
        and all(map(_is_call, group["calls"]))
    )


def _is_call(call: object) -> bool:
    return (
        isinstance(call, dict)
        and type(call.get("seq")) is int
        and isinstance(call.get("op"), str)
        and isinstance(call.get("dtype"), str)
        and isinstance(call.get("at"), str)
        and isinstance(call.get("done"), bool)
        and isinstance(call.get("seconds"), int | float)
        and isinstance(call.get("sizes"), list)
        and all(
            isinstance(size, list) and all(type(each) is int for each in size)
            for size in call["sizes"]
        )
    )
