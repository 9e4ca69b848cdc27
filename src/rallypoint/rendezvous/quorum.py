"""Decides when a round is complete, which nodes are in it, and if it is not complete, why. Pure.

Rules, in this order:

1. A node that is known to be gone does not count.
2. Enough of the last round's members must have arrived (``survivors_needed``): two halves of a split
   network must not both go on.
3. ``max_nodes`` have arrived: close; surplus nodes become spares. If newcomers have taken the room of members of the last
   round that are alive and on their way, wait for those briefly (``straggler``): their workers may go on as they are.
4. ``min_nodes`` have arrived, and no other node is expected (in the first round this is unknown; later, the nodes
   expected are the last round's members that are still alive and nodes that have waited): close.
5. ``min_nodes`` have arrived, and the last call is over: close. It starts when they have arrived. A live member of the
   last round is waited for even then: whatever delays it (its workers save a checkpoint), it is alive.
6. If the store was lost, it is unknown which nodes wait. Members that hold workers, which can be kept only if as many
   nodes as before take part, wait briefly (``straggler``) for more nodes.
7. Otherwise not yet.

Ranks are sticky: a survivor keeps its rank if the round has that rank; the holes are filled in natural
order of host names. With topology labels, nodes with the same label get adjacent ranks instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a job requires of its rounds.

    Args:
        min_nodes: with fewer nodes the job cannot go on.
        max_nodes: nodes beyond this number are kept as spares.
        last_call: seconds that a round stays open once ``min_nodes`` have arrived.
        straggler: seconds to wait for nodes that are known to be waiting.
        by_label: whether nodes with the same topology label get adjacent ranks.
    """

    min_nodes: int
    max_nodes: int
    last_call: float = 30.0
    straggler: float = 5.0
    by_label: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A node in the round's list.

    Args:
        slot: its place in the list, in order of arrival.
        node_id: identifies it among all nodes, in every round.
        host: its host name, for messages and for the order of ranks.
        label: its rack or switch, or empty.
        last_rank: its rank in the last round, or None if it was not a member.
        given_rank: the rank its user gave it, or None.
    """

    slot: int
    node_id: str
    host: str
    label: str = ""
    last_rank: int | None = None
    given_rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What the leader knows.

    Args:
        arrivals: the nodes that have arrived, by slot.
        first_round: it is unknown which nodes will arrive.
        missing: ids of the last round's members that have not arrived and are not known to be gone.
        waiting: how many nodes have said that they wait for this round.
        gone: ids of nodes that are lost or have left.
        survivors_needed: how many of the last round's members must have arrived.
        wanted: how many nodes it takes to keep the workers that nodes hold, if it is unknown which nodes wait; otherwise 0.
        enough_since: when ``min_nodes`` had first arrived, or None.
        out_of_time: the time to join is over; the nodes that have arrived go on if they are enough.
    """

    arrivals: Mapping[int, Arrival]
    first_round: bool
    missing: frozenset[str] = frozenset()
    waiting: int = 0
    gone: frozenset[str] = frozenset()
    survivors_needed: int = 0
    wanted: int = 0
    enough_since: float | None = None
    out_of_time: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """The round is complete: the members' slots in rank order, and the spares' slots."""

    order: tuple[int, ...]
    spares: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class NotYet:
    """Why the round is not complete, when to look again at the latest, and how many filled slots may change the decision."""

    reason: str
    look_at: float | None = None
    slots: int = 0
    enough: bool = field(default=False)


def survivors_needed(members: int, ended: int, *, moved: bool) -> int:
    """How many of the last round's members make it safe to go on.

    Members that are not here may be alive behind a broken network, and must not go on as well. Members that are
    known to have exited cannot. Of two equal halves, the one that has kept the store goes on.

    Args:
        members: how many members the last round had.
        ended: how many of them are known to have exited.
        moved: the store was lost, and the nodes have met in another place.
    """
    undecided = members - ended
    return undecided // 2 + 1 if moved else (undecided + 1) // 2


def decide(now: float, settings: Settings, standing: Standing) -> Close | NotYet:
    """Whether the round can be closed. ``now`` and all times are seconds on the caller's clock."""
    present = _present(standing)
    count, least, most = len(present), settings.min_nodes, settings.max_nodes
    filled = len(standing.arrivals)
    survivors = sum(arrival.last_rank is not None for arrival in present)
    if survivors < standing.survivors_needed:
        reason = (
            f"{survivors} of the last round's nodes are here, {standing.survivors_needed} are needed:"
            " the others may continue without this node, behind a network failure"
        )
        return NotYet(reason, None, filled + 1)
    since = now if standing.enough_since is None else standing.enough_since
    if count >= most:
        fresh, room = count - survivors, most - survivors - len(standing.missing)
        is_over = standing.out_of_time or now >= since + settings.straggler
        if standing.missing and fresh > room and not is_over:
            reason = f"{most} nodes are here, but not all members of the last round that are alive"
            return NotYet(reason, since + settings.straggler, filled + 1, enough=True)
        return _close(present, settings, f"all {most} nodes are here")
    if count < least:
        return NotYet(f"{count} of {least} nodes are here", None, filled + least - count)
    if standing.out_of_time:
        return _close(present, settings, f"{count} nodes are here and the time to join is over")
    fresh = count - survivors
    late = max(0, standing.waiting - fresh)
    if not standing.first_round:
        if not standing.missing and count < standing.wanted and now < since + settings.straggler:
            reason = f"{count} nodes hold workers, and {standing.wanted} are needed to keep them"
            look_at = since + settings.straggler
            return NotYet(reason, look_at, filled + standing.wanted - count, enough=True)
        if not standing.missing and not late:
            return _close(present, settings, f"all {count} nodes that are left are here")
        if not standing.missing and now >= since + settings.straggler:
            return _close(present, settings, f"{late} waiting nodes did not arrive")
        if standing.missing:
            reason = f"nodes of the last round that are alive but have not arrived: {len(standing.missing)}"
            return NotYet(reason, None, filled + 1, enough=True)
        reason = f"{late} waiting nodes have not arrived yet"
        return NotYet(reason, since + settings.straggler, filled + late, enough=True)
    if now >= since + settings.last_call:
        return _close(present, settings, f"{count} nodes are here and the last call is over")
    reason = f"{count} of {least} to {most} nodes are here; the last call is open"
    return NotYet(reason, since + settings.last_call, filled + most - count, enough=True)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts ``node2`` before ``node10``."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def _present(standing: Standing) -> list[Arrival]:
    """One arrival for each node that counts: the last, if a node arrived twice."""
    by_id = {
        arrival.node_id: arrival
        for _, arrival in sorted(standing.arrivals.items())
        if arrival.node_id not in standing.gone
    }
    return sorted(by_id.values(), key=lambda arrival: arrival.slot)


def _close(present: Sequence[Arrival], settings: Settings, reason: str) -> Close:
    # Members of the last round stay in; among newcomers, those that arrived last become spares first.
    seniority = sorted(present, key=lambda each: (each.last_rank is None, each.slot))
    chosen, spares = seniority[: settings.max_nodes], seniority[settings.max_nodes :]
    ranked = assign_ranks(chosen, by_label=settings.by_label)
    return Close(
        tuple(each.slot for each in ranked), tuple(sorted(each.slot for each in spares)), reason
    )


def assign_ranks(nodes: Sequence[Arrival], *, by_label: bool = False) -> list[Arrival]:
    """The nodes in rank order: by given rank, then by last rank if the round has it, then by label and host name."""
    places: list[Arrival | None] = [None] * len(nodes)
    rest = []
    for node in sorted(nodes, key=lambda each: each.given_rank is None):
        rank = node.last_rank if node.given_rank is None else node.given_rank
        if rank is not None and 0 <= rank < len(places) and places[rank] is None:
            places[rank] = node
        else:
            rest.append(node)
    rest.sort(key=lambda each: (natural_key(each.label), natural_key(each.host), each.slot))
    remaining = iter(rest)
    ranked = [next(remaining) if place is None else place for place in places]
    if not by_label or any(each.given_rank is not None for each in nodes):
        return ranked
    # Labels in the order of their first nodes; nodes with the same label in rank order.
    first_seen = {node.label: index for index, node in reversed(list(enumerate(ranked)))}
    return sorted(ranked, key=lambda each: first_seen[each.label])
