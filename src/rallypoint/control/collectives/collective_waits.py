"""Who waits for whom in which collective, from what each rank has started (:mod:`rallypoint._core.flight_records`). Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rallypoint._core.flight_records import Group
from rallypoint._core.rank_words import in_words


Call = Mapping[str, Any]

# Collectives in which every rank must pass the same type and sizes.
_EVEN = (
    "all_reduce",
    "allreduce",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "allgather",
)
# torch's C++ names of types: bytes per element, and the Python name.
_TYPES = {
    "Byte": (1, "uint8"),
    "Char": (1, "int8"),
    "Bool": (1, "bool"),
    "Short": (2, "int16"),
    "Int": (4, "int32"),
    "Long": (8, "int64"),
    "Half": (2, "float16"),
    "BFloat16": (2, "bfloat16"),
    "Float": (4, "float32"),
    "Double": (8, "float64"),
    "ComplexFloat": (8, "complex64"),
    "ComplexDouble": (16, "complex128"),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why ranks wait.

    Args:
        missing: the ranks that the others wait for, or whose call differs; empty if neither side can be singled out.
        waiting: the ranks that wait in a collective.
        text: one sentence, without a full stop, for each group in which ranks wait in vain.
    """

    missing: tuple[int, ...]
    waiting: tuple[int, ...]
    text: str


def verdict(known: Mapping[int, Sequence[Group]], unheard: Collection[int] = ()) -> Verdict | None:
    """Who waits for whom.

    Args:
        known: by rank, what it has started in each of its groups. A rank that did not answer is left out.
        unheard: the ranks of nodes that did not answer at all. They may be waiting like the others, so they are not blamed,
            unlike a silent rank on a node that did answer.

    Returns:
        None if no rank is known to wait in vain.
    """
    mismatches: list[tuple[set[int], str]] = []
    lags: list[tuple[set[int], str]] = []
    waiting: set[int] = set()
    for (own, members), calls in sorted(_by_group(known).items()):
        pending = {rank: _first_pending(each) for rank, each in calls.items()}
        waiting |= {rank for rank, each in pending.items() if each is not None}
        name = _name(own, members, calls, known)
        if (differs := _mismatch(calls, name)) is not None:
            mismatches.append(differs)
        elif (behind := _lag(members, calls, pending, name, known, unheard)) is not None:
            lags.append(behind)
    found = mismatches or lags
    if not found:
        return None
    # Ranks that wait nowhere are to blame. If all wait, in a circle, blame the few that the many wait for.
    awaited = set().union(*(ranks for ranks, _ in found))
    missing = awaited - waiting or min((ranks for ranks, _ in found), key=len)
    return Verdict(
        tuple(sorted(missing)),
        tuple(sorted(waiting - missing)),
        "; ".join(sentence for _, sentence in found),
    )


def mismatch(known: Mapping[int, Sequence[Group]]) -> str:
    """The calls that do not match, in words as in :func:`verdict`; or nothing. Some of the ranks may have ended."""
    found = [
        _mismatch(calls, _name(own, members, calls, known))
        for (own, members), calls in sorted(_by_group(known).items())
    ]
    return "; ".join(each[1] for each in found if each is not None)


def longest(known: Mapping[int, Sequence[Group]]) -> float | None:
    """The longest time, in seconds, that a rank has waited in a collective; None if none is known to wait."""
    pending = [
        _first_pending(calls) for by_rank in _by_group(known).values() for calls in by_rank.values()
    ]
    return max((float(each["seconds"]) for each in pending if each is not None), default=None)


def last_begun(
    known: Mapping[int, Sequence[Group]],
) -> dict[tuple[str, tuple[int, ...]], dict[int, int]]:
    """The number of the last collective, by group (its name and members) and rank."""
    return {
        key: {rank: calls[-1]["seq"] for rank, calls in of_ranks.items()}
        for key, of_ranks in _by_group(known).items()
    }


def place(groups: Sequence[Group]) -> str:
    """What a rank waits in, such as ``all_reduce #1542 of the default group (float32, 4.0 MiB) for 212 s``; or nothing."""
    waits = [(each, group) for group in groups if (each := _first_pending(group["calls"]))]
    if not waits:
        return ""
    call, group = max(waits, key=lambda each: float(each[0]["seconds"]))
    name = _name(group["name"], tuple(group["ranks"]), {}, {0: [group]})
    return f"{_call(call)} of {name} for {call['seconds']:.0f} s"


def _by_group(
    known: Mapping[int, Sequence[Group]],
) -> dict[tuple[str, tuple[int, ...]], dict[int, Sequence[Call]]]:
    """The calls, by group (its name and members) and rank."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, Sequence[Call]]] = defaultdict(dict)
    for rank, groups in known.items():
        for group in groups:
            if len(group["ranks"]) > 1 and group["calls"]:
                found[group["name"], tuple(group["ranks"])][rank] = group["calls"]
    return found


def _first_pending(calls: Sequence[Call]) -> Call | None:
    return next((each for each in calls if not each["done"]), None)


def _mismatch(calls: Mapping[int, Sequence[Call]], name: str) -> tuple[set[int], str] | None:
    """Ranks whose calls with the same number in a group differ."""
    numbered: dict[int, dict[int, Call]] = defaultdict(dict)
    for rank, each in calls.items():
        for call in each:
            numbered[call["seq"]][rank] = call
    for seq, of_ranks in sorted(numbered.items()):
        ways: dict[object, list[int]] = defaultdict(list)
        for rank, call in sorted(of_ranks.items()):
            ways[_must_match(call)].append(rank)
        if len(ways) < 2:
            continue
        few, *others = sorted(ways.values(), key=lambda ranks: (len(ranks), ranks))
        parts = [
            f"{in_words(ranks)} {'calls' if len(ranks) == 1 else 'call'}"
            f" {_call(of_ranks[ranks[0]], numbered=False)}{_at(of_ranks[ranks[0]])}"
            for ranks in (few, *others)
        ]
        odd = set() if len(few) == len(others[-1]) else set(few)
        return odd, f"the calls #{seq} of {name} do not match: {', '.join(parts)}"
    return None


def _must_match(call: Call) -> object:
    if call["op"].startswith(_EVEN):
        return call["op"], call["dtype"], tuple(map(tuple, call["sizes"]))
    return call["op"]


def _lag(
    members: Sequence[int],
    calls: Mapping[int, Sequence[Call]],
    pending: Mapping[int, Call | None],
    name: str,
    known: Mapping[int, Sequence[Group]],
    unheard: Collection[int],
) -> tuple[set[int], str] | None:
    """Members that have not entered the call that the others wait in. An empty set if nothing is known about them."""
    waits = {rank: call for rank, call in pending.items() if call is not None}
    if not waits:
        return None
    seq = min(call["seq"] for call in waits.values())
    here = sorted(rank for rank, call in waits.items() if call["seq"] == seq)
    absent = {rank for rank in members if rank not in calls or calls[rank][-1]["seq"] < seq}
    if not absent:
        return None
    call = waits[here[0]]
    seconds = max(float(waits[rank]["seconds"]) for rank in here)
    wait = "waits" if len(here) == 1 else "wait"
    what, others = f"{_call(call)} of {name}", f"{in_words(here)} {wait} ({seconds:.0f} s)"
    heard = absent.difference(unheard)
    if not heard:
        whose = "node" if len(absent) == 1 else "nodes"
        return heard, (
            f"{in_words(here)} {wait} in {what} ({seconds:.0f} s); nothing is known of {in_words(absent)}, whose {whose} did not answer"
        )
    absent = heard
    have = "has" if len(absent) == 1 else "have"
    sentence = f"{in_words(absent)} {have} not entered {what}, in which {others}"
    where = {place(known[rank]) for rank in absent if rank in known} - {""}
    if len(where) == 1:
        they = "it waits" if len(absent) == 1 else "they wait"
        sentence += f"; {they} in {where.pop()}"
    return absent, sentence


def _name(
    own: str,
    members: Sequence[int],
    calls: Iterable[int],
    known: Mapping[int, Sequence[Group]],
) -> str:
    """A group's name for people: its description, or else its ranks. Several groups may have the same members."""
    ranks = list(calls) or list(known)
    about = next(
        each["about"]
        for rank in ranks
        for each in known[rank]
        if each["name"] == own and tuple(each["ranks"]) == tuple(members)
    )
    if about == "default_pg":
        return "the default group"
    if about and about != "undefined":
        return f"group {about}"
    return f"the group of {in_words(members)}" if members else "a group"


def _call(call: Call, *, numbered: bool = True) -> str:
    number = f" #{call['seq']}" if numbered else ""
    width, dtype = _TYPES.get(call["dtype"], (0, call["dtype"].lower()))
    elements = sum(math.prod(size) for size in call["sizes"])
    if not dtype or (not elements and not call["sizes"]):
        return f"{call['op']}{number}"
    size = f", {_bytes(elements * width)}" if width else ""
    shapes = ", ".join(str(each) for each in call["sizes"][:3])
    more = ", …" if len(call["sizes"]) > 3 else ""
    return f"{call['op']}{number} ({dtype} {shapes}{more}{size})"


def _at(call: Call) -> str:
    return f" at {call['at']}" if call["at"] else ""


def _bytes(count: int) -> str:
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
