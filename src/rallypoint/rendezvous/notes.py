"""Decides which of two stores is the job's, and keeps the notes that lead from one to the other. Pure.

When the job's store moves, other stores may remain: one that a restarted node serves at the endpoint, one in a part of the
network that was cut off, one whose node was redirected. Each of them gets a note that points to a newer store. All
nodes agree which of two stores is newer (:class:`Age`), and ages only grow. So notes lead to ever newer stores,
never in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import fields


_MOVE_OF_MEMBER = 1_000_000


@dataclass(frozen=True, order=True, slots=True)
class Age:
    """How much a store has seen. The store with the greater age is the job's.

    Args:
        generation: its next round. Of two parts of a broken network, only the one that went on has a later round.
        moves: how often the job's store had moved when it came here. At first, a store that has moved has seen no more
            rounds than the one its nodes come from.
        store: its random name, which distinguishes two stores that moved at the same time.
    """

    generation: int = 0
    moves: int = 0
    store: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """The job's store is elsewhere now, and the others meet there. ``age`` is its age when this was noted."""

    addr: str
    port: int
    age: Age = Age()


def moves_after(moves: int, *, by_member: bool) -> int:
    """The number of moves of the store that a node comes to, from that of the store it has lost.

    Args:
        moves: the lost store's.
        by_member: the node was a member of the last round. A node that only waited knows no plan, so a store that only
            such nodes have come to is never newer than one with a member.
    """
    return moves + _MOVE_OF_MEMBER if by_member else moves % _MOVE_OF_MEMBER + 1


def age(head: Mapping[str, Any] | None, store: Mapping[str, Any] | None) -> Age:
    """The age of a store, from its records ``head`` and ``store``."""
    body = store or {}
    return Age(
        fields.generation(head), fields.number(body.get("moves")), fields.node_id(body.get("name"))
    )


def written(moved: Moved) -> dict[str, Any]:
    """The note as a record."""
    return {
        "addr": moved.addr,
        "port": moved.port,
        "generation": moved.age.generation,
        "moves": moved.age.moves,
        "store": moved.age.store,
    }


def read(note: object) -> Moved | None:
    """A note; None if it makes no sense."""
    if not isinstance(note, dict):
        return None
    addr, port = note.get("addr"), fields.number(note.get("port"))
    if not (isinstance(addr, str) and addr and 0 < port < 65536):
        return None
    told = Age(
        fields.number(note.get("generation")),
        fields.number(note.get("moves")),
        fields.node_id(note.get("store")),
    )
    return Moved(addr, port, told)


def leads_on(note: object, here: Age, ended: frozenset[str] = frozenset()) -> Moved | None:
    """Where to go from a store with this note in it; None: stay.

    Args:
        note: the note as it stands there.
        here: the current age of that store.
        ended: names of stores that are known to be no longer served.
    """
    moved = read(note)
    if moved is None or moved.age <= here or moved.age.store in ended:
        return None
    return moved


def is_news(note: Moved, held: object) -> bool:
    """Whether a note should replace the one in place."""
    before = read(held)
    return before is None or before.age < note.age


def to_lead_to(one: Age, other: Age) -> Age | None:
    """The newer of two stores, if the other should get a note that leads there.

    It should not if the two are the same store, or before the newer one has its name.
    """
    newer = max(one, other)
    return newer if newer.store and one.store != other.store else None
