"""Decides whether the nodes of a round keep the workers that they had in the last one. Pure.

Workers in a session survive the loss of a node. A node that holds such workers says so in its record. If, in the new round,
all of these nodes have their old ranks, as many nodes take part as before, and each has as many workers, then
ranks and world size stay: the workers continue, and the nodes in the free places start replacements for the lost ones.

Workers whose session can go on with another number of ranks (*resizes*) also continue if fewer or more nodes take part, or
if nodes change ranks: each worker gets a new rank.

A new worker runs the script's set-up with the ranks of the session's *first* round, as all others did, in the place of a worker
of that round (its node's *origin*). Each worker's set-up is recorded in the workers' store, on node 0, and the nodes that follow
a node hold copies of its records: one of them by default. If the store is lost together with a node and all holders of its
copies, the records are gone, and all workers restart. A replacement worker has no records until it joins the session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from . import fields


_NO_RECORDS = "the set-up record that new workers need is lost with the nodes that had it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The workers that a node holds.

    Args:
        generation: the round they are from.
        workers: each node's number of workers in that round, by rank.
        replaced: how many were replaced since their session started, as far as this node knows.
        has_state: whether any of them is in the session, rather than about to enter it.
        has_records: whether all of them are in the session, and no record of theirs, and no copy they should hold, is missing.
        copies: how many nodes should have the records of each node, including itself; 0: unknown.
        port: the port of their store, on node 0; 0 if no node has served it yet.
        resizes: whether they can go on with another number of ranks.
        first: each node's number of workers in the session's first round; empty: as ``workers``.
        origin: the rank, in the session's first round, of the node whose set-up they have run.
    """

    generation: int
    workers: tuple[int, ...]
    replaced: int = 0
    has_state: bool = True
    has_records: bool = True
    copies: int = 2
    port: int = 0
    resizes: bool = False
    first: tuple[int, ...] = ()
    origin: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "workers": list(self.workers),
            "replaced": self.replaced,
            "has_state": self.has_state,
            "has_records": self.has_records,
            "copies": self.copies,
            "port": self.port,
            **({"resizes": True} if self.resizes else {}),
            **({"first": list(self.first), "origin": self.origin} if self.first else {}),
        }

    @classmethod
    def from_json(cls, held: object) -> Self | None:
        """None if the node holds no workers, or the value makes no sense."""
        if not isinstance(held, dict) or not isinstance(held.get("workers"), list):
            return None
        return cls(
            generation=fields.number(held.get("generation")),
            workers=tuple(fields.number(each) for each in held["workers"]),
            replaced=fields.number(held.get("replaced")),
            has_state=held.get("has_state") is True,
            has_records=held.get("has_records") is True,
            copies=fields.number(held.get("copies")),
            port=fields.number(held.get("port")),
            resizes=held.get("resizes") is True,
            first=_numbers(held.get("first")),
            origin=fields.number(held.get("origin")),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A round in which nodes keep their workers.

    Args:
        keepers: the ranks of these nodes.
        bare: the keepers with no worker in the session: their workers take lost places, and have no state yet.
        lacking: the keepers that lack a record of the script's set-up that they should have.
        replaced: how many workers were replaced since the session started: the most that any keeper knows of.
        port: the port of the workers' store on node 0; 0 if node 0 has to serve another store.
        copies: how many nodes should have the records of each node.
        first: each node's number of workers in the session's first round; empty: these and all ranks are as in this round.
        origins: by node rank, the rank in the first round of the node whose set-up its workers run or have run.
        before: each node's number of workers in the last round, if ranks have changed since; otherwise empty.
        were: by node rank, the node's rank in the last round; -1: it was not a member.
    """

    keepers: frozenset[int]
    replaced: int
    port: int
    copies: int = 2
    first: tuple[int, ...] = ()
    origins: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    were: tuple[int, ...] = ()
    bare: frozenset[int] = frozenset()
    lacking: frozenset[int] = frozenset()

    def relies_on(self, rank: int, count: int) -> bool:
        """Whether newcomers may find records of the script's set-up only on this node, because the store that had them is lost.

        Args:
            rank: the node's rank.
            count: the number of nodes in the round.
        """
        if self.port:
            return False
        whole = self.keepers - self.lacking
        holders = (_holders(node, self.copies, count) for node in range(count))
        return bool(self.first) or any(each & whole == {rank} for each in holders)

    def to_json(self) -> dict[str, Any]:
        lists = {
            "first": self.first,
            "origins": self.origins,
            "before": self.before,
            "were": self.were,
            "bare": tuple(sorted(self.bare)),
            "lacking": tuple(sorted(self.lacking)),
        }
        return {
            "keepers": sorted(self.keepers),
            "replaced": self.replaced,
            "port": self.port,
            "copies": self.copies,
            **{name: list(each) for name, each in lists.items() if each},
        }

    @classmethod
    def from_json(cls, kept: object) -> Self | None:
        """None if all workers restart."""
        if not isinstance(kept, dict) or not isinstance(kept.get("keepers"), list):
            return None
        return cls(
            keepers=frozenset(fields.number(each) for each in kept["keepers"]),
            replaced=fields.number(kept.get("replaced")),
            port=fields.number(kept.get("port")),
            copies=fields.number(kept.get("copies")),
            first=_numbers(kept.get("first")),
            origins=_numbers(kept.get("origins")),
            before=_numbers(kept.get("before")),
            were=_numbers(kept.get("were"), least=-1),
            bare=frozenset(_numbers(kept.get("bare"))),
            lacking=frozenset(_numbers(kept.get("lacking"))),
        )


def wanted(records: Iterable[Mapping[str, Any]]) -> int:
    """How many nodes it takes to keep the workers; 0 if no node holds any."""
    held = [Held.from_json(fields.facts_in(record).get("held")) for record in records]
    return max((len(each.workers) for each in held if each is not None), default=0)


def decide(records: Sequence[Mapping[str, Any]], workers: Sequence[int]) -> tuple[Kept | None, str]:
    """How the nodes keep their workers, or None if they do not; and the reason for None in words, empty if no node holds any.

    Args:
        records: the records of the round's nodes, in the order of their new ranks.
        workers: each node's number of workers.
    """
    keepers: dict[int, tuple[int, Held]] = {}
    for rank, record in enumerate(records):
        last, held = record.get("last_rank"), Held.from_json(fields.facts_in(record).get("held"))
        # A member of the last round that has stopped its workers is like a newcomer.
        if isinstance(last, int) and held is not None:
            keepers[rank] = last, held
    if not keepers:
        return None, ""
    same = {(each.generation, each.workers, each.first) for _, each in keepers.values()}
    if len(same) != 1:
        return None, "the nodes hold workers of different rounds"
    if not any(each.has_state for _, each in keepers.values()):
        return None, "no remaining worker has the session's state"
    ((_, before, first),) = same
    places = {(last, rank) for rank, (last, _) in keepers.items()}
    for last, rank in places:
        if not 0 <= last < len(before) or before[last] != workers[rank]:
            return None, f"node {last} has another number of workers than before"
    if first and any(not 0 <= each.origin < len(first) for _, each in keepers.values()):
        return None, _NO_RECORDS
    stays = before == tuple(workers) and all(last == rank for last, rank in places)
    if not stays and not all(each.resizes for _, each in keepers.values()):
        return None, (
            f"{sum(before)} ranks would become {sum(workers)}, for which the session must start anew"
            if sum(before) != sum(workers)
            else "the ranks of nodes change, for which the session must start anew"
        )
    has_store = 0 in keepers and keepers[0][0] == 0 and keepers[0][1].port != 0
    origins = _origins(keepers, first, workers, stays=stays, has_store=has_store)
    if origins is None:
        return None, _NO_RECORDS
    is_first = stays and not first
    were = (
        ()
        if stays
        else (keepers[rank][0] if rank in keepers else -1 for rank in range(len(records)))
    )
    kept = Kept(
        keepers=frozenset(keepers),
        replaced=max(each.replaced for _, each in keepers.values()),
        port=keepers[0][1].port if has_store else 0,
        copies=_copies(keepers),
        first=() if is_first else first or before,
        origins=() if is_first else origins,
        before=() if stays else before,
        were=tuple(were),
        bare=frozenset(rank for rank, (_, each) in keepers.items() if not each.has_state),
        lacking=frozenset(rank for rank, (_, each) in keepers.items() if not each.has_records),
    )
    return kept, ""


def _origins(
    keepers: Mapping[int, tuple[int, Held]],
    first: Sequence[int],
    workers: Sequence[int],
    *,
    stays: bool,
    has_store: bool,
) -> tuple[int, ...] | None:
    """For each node, the origin whose set-up its workers run or have run; None if a new node would find no records to run."""
    count = len(workers)
    if stays and not first:
        whole = {node for node, (_, each) in keepers.items() if each.has_records}
        copies = _copies(keepers)
        is_lost = any(not _holders(node, copies, count) & whole for node in range(count))
        return None if is_lost and not has_store else tuple(range(count))
    # A new node's workers repeat what another node's did: each of their groups spans all ranks, and gives all the same results.
    of_keepers = {rank: each.origin if first else last for rank, (last, each) in keepers.items()}
    known = {
        workers[rank]: origin
        for rank, origin in of_keepers.items()
        if has_store or keepers[rank][1].has_records
    }
    found = [
        of_keepers[rank] if rank in of_keepers else known.get(workers[rank], -1)
        for rank in range(count)
    ]
    return None if -1 in found else tuple(found)


def _holders(node: int, copies: int, count: int) -> frozenset[int]:
    """The nodes that should have the records of a node."""
    return frozenset((node + distance) % count for distance in range(min(max(1, copies), count)))


def _copies(keepers: Mapping[int, tuple[int, Held]]) -> int:
    """How many nodes should have the records of each node: the least that any keeper knows."""
    return min((each.copies for _, each in keepers.values() if each.copies), default=1)


def _numbers(value: object, least: int = 0) -> tuple[int, ...]:
    found = value if isinstance(value, list) else []
    return tuple(each if type(each) is int and each >= least else least for each in found)
