"""The members of a dynamic group, from its journal. Pure.

Theory of operation
-------------------
The journal is a numbered list of entries in the store. Every member applies all of them in order:

1. An entry is written in two steps: take the next number from a counter, then set the entry under that number unless
   it is already set. Writers never wait for each other.
2. An entry is applied when all entries before it are. The *epoch* is the number of the last one applied, so all
   processes at the same epoch see the same members.
3. A process that dies between the two steps leaves a hole. A reader that has seen the hole for ``HOLE_GRACE`` on its
   own clock fills it with a void entry. A writer that was merely slow finds its number used, and takes another.
4. A join is refused if its name or rank is taken *at its place in the journal*. So names and ranks are unique without
   locks, a process that dies while it joins reserves nothing, and a name is free from the epoch at which its holder left.
5. A join without a rank gets the one after the highest ever used, so that a remembered rank never means another worker.
6. Leave and loss entries name an incarnation. Repeated ones change nothing. Reports by processes that are no longer
   members are ignored: a process that is cut off from the network finds all others silent.
7. An outline lists the entries that made the present members, so that a newcomer need not read the whole journal.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rallypoint.errors import InternalError, ProtocolError
from rallypoint.rpc.device_map import NodeDevices, find_problem

from .member import (
    MAX_ID,
    MAX_TEXT,
    RECORD_VERSION,
    Member,
    dump,
    load,
    member_from,
    shown,
    text,
    whole,
)


# Seconds before a hole may be filled. A round trip to the store takes milliseconds.
HOLE_GRACE: Final = 1.0
# An outline is written once per this many entries.
OUTLINE_EVERY: Final = 256
# Bytes of an outline: enough for 60,000 members.
MAX_OUTLINE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Join:
    """A process asks to join.

    Args:
        member: its record.
        given: whether it asks for the rank in its record; otherwise it is assigned one.
    """

    member: Member
    given: bool = True


@dataclass(frozen=True, slots=True)
class Leave:
    """A member leaves."""

    rank: int
    incarnation: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """A member was lost, according to another one.

    Args:
        by: the incarnation of the reporter; empty: not known.
    """

    rank: int
    incarnation: str
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Void:
    """Nothing: fills a hole."""


Entry = Join | Leave | Lost | Void
VOID: Final = Void()


def encode(entry: Entry) -> bytes:
    """An entry's bytes.

    Raises:
        ProtocolError: it is too large, or its member's `extra` is not JSON.
    """
    body: dict[str, Any]
    match entry:
        case Join(member, given):
            body = {"kind": "join", "member": member.body(), "given": given}
        case Leave(rank, incarnation, reason):
            body = _departure("leave", rank, incarnation, reason)
        case Lost(rank, incarnation, reason, by):
            body = {**_departure("lost", rank, incarnation, reason), "by": by}
        case Void():
            body = {"kind": "void"}
    return dump({"v": RECORD_VERSION, **body}, "membership")


def _departure(kind: str, rank: int, incarnation: str, reason: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "rank": rank,
        "incarnation": incarnation,
        "reason": reason[:MAX_TEXT],
    }


def decode(data: bytes) -> Entry:
    """The inverse of :func:`encode`.

    Raises:
        ProtocolError: the bytes are not a valid entry.
    """
    record = load(data, "membership")
    match record.get("kind"):
        case "join":
            given = record.get("given")
            if not isinstance(given, bool):
                raise ProtocolError(
                    f"given in a membership record is {shown(given)}, expected true or false"
                )
            return Join(member_from(record.get("member")), given)
        case "leave":
            return Leave(*_departed(record))
        case "lost":
            return Lost(*_departed(record), text(record.get("by", ""), "by"))
        case "void":
            return VOID
        case kind:
            raise ProtocolError(f"a membership record has unknown kind {shown(kind)}")


def _departed(record: Mapping[str, Any]) -> tuple[int, str, str]:
    return (
        whole(record.get("rank"), "rank"),
        text(record.get("incarnation"), "incarnation"),
        text(record.get("reason"), "reason"),
    )


# -- the view -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seat:
    """A member, and the number of the entry that made it one."""

    member: Member
    number: int


@dataclass(frozen=True, slots=True)
class View:
    """The group after some entries.

    Args:
        epoch: the number of the last entry.
        seats: the members, by rank.
        ranks: the members' ranks, by name.
        next_rank: the rank for the next join that asks for none.
    """

    epoch: int = 0
    seats: Mapping[int, Seat] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    next_rank: int = 0

    def members(self) -> tuple[Member, ...]:
        """The members, by rank."""
        return tuple(seat.member for _, seat in sorted(self.seats.items()))

    def find(self, key: str | int) -> Member | None:
        """The member of that name or rank."""
        rank = self.ranks.get(key) if isinstance(key, str) else key
        seat = None if rank is None else self.seats.get(rank)
        return None if seat is None else seat.member

    def holds(self, rank: int, incarnation: str) -> Member | None:
        """The member of that rank, if it has that incarnation."""
        member = self.find(rank)
        return member if member is not None and member.incarnation == incarnation else None

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """The ``names`` that no member has, in their order."""
        return tuple(name for name in dict.fromkeys(names) if name not in self.ranks)

    def refusal(self, name: str, rank: int | None) -> str | None:
        """Why a join with this name and rank is refused now; None if it is not.

        Args:
            rank: None: the group assigns one.
        """
        holder = self.find(name)
        if holder is not None:
            return (
                f"RPC worker name {name} is not unique: {holder} has it (a name becomes free when its"
                " holder leaves or is reported lost)"
            )
        holder = None if rank is None else self.find(rank)
        if holder is not None:
            return f"rank {rank} is taken by {holder}; use another one, or none to be assigned one"
        return None


@dataclass(frozen=True, slots=True)
class Joined:
    """A member has joined at ``epoch``."""

    epoch: int
    member: Member


@dataclass(frozen=True, slots=True)
class Gone:
    """A member has left or was lost at ``epoch``."""

    epoch: int
    member: Member
    reason: str
    lost: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A join was refused."""

    epoch: int
    member: Member
    reason: str


Event = Joined | Gone | Refused


def advance(view: View, first: int, entries: Sequence[Entry]) -> tuple[View, tuple[Event, ...]]:
    """Apply entries in order.

    Args:
        first: the number of the first one. Entries that the view already includes are skipped.

    Returns:
        The view after the last one, and the events since ``view``, in order.

    Raises:
        InternalError: there is a gap between the view and the entries.
    """
    if first > view.epoch + 1:
        raise InternalError(f"membership entry {first} would be applied at epoch {view.epoch}")
    fresh = entries[view.epoch + 1 - first :]
    if not fresh:
        return view, ()
    # Copied once for all entries: a newcomer may apply thousands.
    working = View(view.epoch, seats := dict(view.seats), ranks := dict(view.ranks), view.next_rank)
    events: list[Event] = []
    for number, entry in enumerate(fresh, view.epoch + 1):
        match entry:
            case Join(member, given):
                reason = working.refusal(member.name, member.id if given else None)
                if reason is not None:
                    events.append(Refused(number, member, reason))
                    continue
                rank = member.id if given else _rank_for(working)
                member = replace(member, id=rank)
                seats[rank] = Seat(member, number)
                ranks[member.name] = rank
                working = replace(working, next_rank=max(working.next_rank, rank + 1))
                events.append(Joined(number, member))
            case Leave(rank, incarnation, reason) | Lost(rank, incarnation, reason):
                gone = working.holds(rank, incarnation)
                if isinstance(entry, Lost) and entry.by and not _is_in(seats, entry.by):
                    continue
                if gone is not None:
                    del seats[rank], ranks[gone.name]
                    events.append(Gone(number, gone, reason, isinstance(entry, Lost)))
            case Void():
                pass
    return replace(working, epoch=view.epoch + len(fresh)), tuple(events)


def _is_in(seats: Mapping[int, Seat], incarnation: str) -> bool:
    return any(seat.member.incarnation == incarnation for seat in seats.values())


def _rank_for(view: View) -> int:
    if view.next_rank <= MAX_ID:
        return view.next_rank
    # A member has asked for the highest possible rank.
    return next(rank for rank in range(MAX_ID) if rank not in view.seats)


def device_problem(view: View, newcomer: Member) -> str | None:
    """A conflict between a newcomer's device maps and the members'; None if there is none."""
    concerned = {
        member.name: member.devices
        for member in view.members()
        if newcomer.name in member.devices.maps or member.name in newcomer.devices.maps
    }
    nodes: dict[str, NodeDevices] = {**concerned, newcomer.name: newcomer.devices}
    return find_problem(nodes, static=False)


# -- holes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Patience:
    """What to do about holes: numbers that the counter has passed but that have no entry.

    Args:
        fill: those that may be filled now.
        since: when the others were first seen, for the next call.
        look_at: when to check again at the latest; None: there is no hole left.
    """

    fill: tuple[int, ...]
    since: Mapping[int, float]
    look_at: float | None


def decide_holes(now: float, since: Mapping[int, float], missing: Collection[int]) -> Patience:
    """Decide which holes to fill. All times are on the caller's monotonic clock.

    Args:
        since: from the last call; empty at the first.
        missing: numbers up to the counter that have no entry now.
    """
    known = {number: since.get(number, now) for number in sorted(missing)}
    fill = tuple(number for number, seen in known.items() if now >= seen + HOLE_GRACE)
    young = {number: seen for number, seen in known.items() if number not in fill}
    return Patience(fill, young, min(young.values()) + HOLE_GRACE if young else None)


# -- outlines -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outline:
    """A view, as the entries that made it.

    Args:
        epoch: the view's.
        next_rank: the view's.
        seats: rank to the number of the entry that made its member.
    """

    epoch: int = 0
    next_rank: int = 0
    seats: Mapping[int, int] = field(default_factory=dict)

    def numbers(self) -> tuple[int, ...]:
        """The entries to read."""
        return tuple(sorted(self.seats.values()))


def outline(view: View) -> Outline:
    return Outline(
        view.epoch, view.next_rank, {rank: seat.number for rank, seat in view.seats.items()}
    )


def encode_outline(plan: Outline) -> bytes:
    """An outline's bytes, perhaps more than ``MAX_OUTLINE``."""
    record = {
        "v": RECORD_VERSION,
        "epoch": plan.epoch,
        "next_rank": plan.next_rank,
        "seats": [[rank, number] for rank, number in plan.seats.items()],
    }
    return json.dumps(record, separators=(",", ":")).encode()


def decode_outline(data: bytes) -> Outline:
    """The inverse of :func:`encode_outline`.

    Raises:
        ProtocolError: the bytes are not a valid outline.
    """
    record = load(data, "outline", MAX_OUTLINE)
    listed = record.get("seats")
    if not isinstance(listed, list):
        raise ProtocolError(f"seats in an outline record is {shown(listed)}, expected a list")
    epoch = whole(record.get("epoch"), "epoch", 2**62)
    seats: dict[int, int] = {}
    for each in listed:
        match each:
            case [rank, number]:
                number = whole(number, "number", epoch)
                seats[whole(rank, "rank")] = number
            case _:
                raise ProtocolError(
                    f"a seat in an outline record is {shown(each)}, expected a rank and a number"
                )
    return Outline(epoch, whole(record.get("next_rank"), "next_rank", MAX_ID + 1), seats)


def restore(plan: Outline, entries: Mapping[int, Entry]) -> View:
    """The view of an outline.

    Args:
        entries: at least those that the outline lists.

    Raises:
        ProtocolError: outline and entries do not match.
    """
    seats: dict[int, Seat] = {}
    for rank, number in plan.seats.items():
        entry = entries.get(number)
        if not isinstance(entry, Join):
            raise ProtocolError(
                f"an outline record lists entry {number} for rank {rank}, which is not a join"
            )
        seats[rank] = Seat(replace(entry.member, id=rank), number)
    ranks = {seat.member.name: rank for rank, seat in seats.items()}
    if len(ranks) < len(seats):
        raise ProtocolError("an outline record lists two members with the same name")
    return View(plan.epoch, seats, ranks, plan.next_rank)
