"""Whether the nodes of a round keep the workers that they had in the last one. Pure.

Workers in a session survive the loss of a node. A node that holds such workers says so in its record. If in the new round all of
these nodes have the ranks that they had, as many nodes take part as before, and each has as many workers, then
ranks and world size stay: the workers continue, and the nodes in the free places start the lost ones anew.

The lost ones' set-up is recorded in the workers' store, on node 0, and the next node has a copy of each node's records. If the store
is lost together with a node and the next one, nobody has them, and all workers start anew. A worker that takes a lost one's
place has no records until it is in the session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from . import fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The workers that a node holds.

    Args:
        generation: of the round they are from.
        workers: number of workers of each node, by rank, in that round.
        replaced: how many were replaced since their session began, as far as this node knows.
        has_state: whether any of them is in the session, not only about to enter it.
        has_records: whether all of them are, so that no record of theirs, and no copy that they have, is missing.
        port: of their store, on node 0.
    """

    generation: int
    workers: tuple[int, ...]
    replaced: int = 0
    has_state: bool = True
    has_records: bool = True
    port: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "workers": list(self.workers),
            "replaced": self.replaced,
            "has_state": self.has_state,
            "has_records": self.has_records,
            "port": self.port,
        }

    @classmethod
    def from_json(cls, held: object) -> Self | None:
        """None if the node holds none, or the value makes no sense."""
        if not isinstance(held, dict) or not isinstance(held.get("workers"), list):
            return None
        return cls(
            generation=fields.number(held.get("generation")),
            workers=tuple(fields.number(each) for each in held["workers"]),
            replaced=fields.number(held.get("replaced")),
            has_state=held.get("has_state") is True,
            has_records=held.get("has_records") is True,
            port=fields.number(held.get("port")),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A round in which nodes keep their workers.

    Args:
        keepers: the ranks of these nodes.
        replaced: how many workers were replaced since the session began: the most that any of them knows of.
        port: of the workers' store on node 0; 0 if node 0 is new and serves another one.
    """

    keepers: frozenset[int]
    replaced: int
    port: int

    def to_json(self) -> dict[str, Any]:
        return {"keepers": sorted(self.keepers), "replaced": self.replaced, "port": self.port}

    @classmethod
    def from_json(cls, kept: object) -> Self | None:
        """None if all workers start anew."""
        if not isinstance(kept, dict) or not isinstance(kept.get("keepers"), list):
            return None
        return cls(
            keepers=frozenset(fields.number(each) for each in kept["keepers"]),
            replaced=fields.number(kept.get("replaced")),
            port=fields.number(kept.get("port")),
        )


def wanted(records: Iterable[Mapping[str, Any]]) -> int:
    """How many nodes it takes for workers to be kept; 0 if no node holds any."""
    held = [Held.from_json(fields.facts_in(record).get("held")) for record in records]
    return max((len(each.workers) for each in held if each is not None), default=0)


def decide(records: Sequence[Mapping[str, Any]], workers: Sequence[int]) -> Kept | None:
    """Whether the nodes keep their workers.

    Args:
        records: of the round's nodes, in the order of their new ranks.
        workers: number of workers of each.
    """
    keepers: dict[int, Held] = {}
    for rank, record in enumerate(records):
        last = record.get("last_rank")
        if not isinstance(last, int):
            continue  # a newcomer
        held = Held.from_json(fields.facts_in(record).get("held"))
        if held is None or last != rank:
            return None
        keepers[rank] = held
    same = {(each.generation, each.workers) for each in keepers.values()}
    if len(same) != 1 or not any(each.has_state for each in keepers.values()):
        return None
    ((_, before),) = same
    if before != tuple(workers):
        return None
    count = len(records)
    whole = {node for node, each in keepers.items() if each.has_records}
    pairs_lost = any(not {node, (node + 1) % count} & whole for node in range(count))
    if 0 not in keepers and pairs_lost:
        return None
    return Kept(
        keepers=frozenset(keepers),
        replaced=max(each.replaced for each in keepers.values()),
        port=keepers[0].port if 0 in keepers else 0,
    )
