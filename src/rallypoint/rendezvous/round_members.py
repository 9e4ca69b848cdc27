"""The members of a round, from its records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from . import fields
from .api import Member
from .liveness import Neighbour
from .record_store import RecordStore


def standbys_in(plan: Mapping[str, Any], generation: int) -> Iterator[Neighbour]:
    """The standbys in a round's plan that can be watched."""
    listed = plan.get("standbys")
    for each in listed if isinstance(listed, list) else ():
        if not isinstance(each, dict):
            continue
        rank, addr, port = each.get("rank"), each.get("addr"), fields.number(each.get("watch"))
        if isinstance(rank, int) and isinstance(addr, str) and 0 < port < 65536:
            node_id = str(each.get("id"))
            yield Neighbour(
                node_id=node_id, rank=rank, host="", addr=(addr, port), generation=generation
            )


def neighbour(rank: int, record: Mapping[str, Any], generation: int) -> Neighbour:
    """A node of a round to watch, from its record."""
    facts = record.get("facts")
    watch = facts.get("watch") if isinstance(facts, dict) else None
    addr = None
    match watch:
        case [str() as host, int() as port] if 0 < port < 65536:
            addr = (host, port)
    return Neighbour(
        node_id=str(record.get("id")),
        rank=rank,
        host=str(record.get("host")),
        addr=addr,
        generation=generation,
    )


class Members(Sequence[Member]):
    """The members of a round by rank. Read on first use: most nodes never need them, and there may be thousands."""

    def __init__(self, records: RecordStore, generation: int, order: Sequence[int]) -> None:
        self._records = records
        self._generation = generation
        self._order = order
        self._read: list[Member] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members())

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Member]: ...
    def __getitem__(self, index: int | slice) -> Member | Sequence[Member]:
        return self._members()[index]

    def _members(self) -> list[Member]:
        if self._read is None:
            keys = [f"{self._generation}/node/{slot}" for slot in self._order]
            self._read = []
            for rank, record in enumerate(self._records.look(keys)):
                body: Mapping[str, Any] = record or {}
                facts = body.get("facts")
                known = facts if isinstance(facts, dict) else {}
                self._read.append(Member(rank=rank, host=str(body.get("host", "?")), facts=known))
        return self._read
