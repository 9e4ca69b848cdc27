"""One generation's journal: any node may append an entry, and all nodes read the entries in the same order.

So every node sees the same first failure and reaches the same decision by itself. A writer increments a counter to
reserve a place, then claims that place: two operations, regardless of the number of writers. A writer that dies between
the two leaves a hole. The next reader that has waited for it long enough fills it with an empty entry.

An entry that matters for a moment only, a question, is withdrawn by its writer: somebody may ask every two seconds for
weeks. Its place becomes a hole, which the writer's list of withdrawn places tells from one that is still to be filled.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final

from rallypoint.rendezvous.record_store import RecordStore

from .place_ranges import PlaceRanges


# Places in a journal; a counter beyond this was not counted by nodes.
MAX_PLACES: Final = 1 << 48


class Journal:
    """The journal, read and written over one connection.

    Args:
        records: the connection.
        generation: the generation it belongs to.
        num_nodes: of that generation; a reader needs it.
    """

    def __init__(self, records: RecordStore, generation: int, num_nodes: int = 0) -> None:
        self._records = records
        self._generation = generation
        self._num_nodes = num_nodes
        self._next = 0

    def append(self, entry: Mapping[str, Any]) -> int:
        """Write an entry at the end. Returns its place."""
        # The id distinguishes this entry from an equal one of another writer.
        mine = {**entry, "id": uuid.uuid4().hex}
        while True:
            place = self._records.increment(self._key("places"), MAX_PLACES) - 1
            if self._records.claim(self._key(str(place)), mine).get("id") == mine["id"]:
                return place

    def withdraw(self, place: int, node_rank: int, withdrawn: PlaceRanges) -> None:
        """Remove an entry of this node.

        Args:
            place: of the entry.
            node_rank: of this node.
            withdrawn: all that it has withdrawn in this generation; the place is added.
        """
        withdrawn.add(place)
        # In this order: who finds the hole must find the reason.
        self._records.write(self._withdrawn_by(node_rank), withdrawn.to_json())
        self._records.delete(self._key(str(place)))

    def next(self, timeout: float) -> dict[str, Any] | None:
        """The next entry; None if none came within ``timeout`` seconds."""
        key = self._key(str(self._next))
        entry = self._records.wait(key, timeout)
        if entry is None:
            if self._records.count(self._key("places"), MAX_PLACES) <= self._next:
                return None
            if (end := self._end_of_withdrawn()) is not None:
                self._next = end
                return {"what": "nothing"}
            entry = self._records.claim(key, {"what": "nothing"})
        self._next += 1
        return entry

    def _end_of_withdrawn(self) -> int | None:
        """The place after the withdrawn ones of which the next is the first; None: it is none of them."""
        keys = [self._withdrawn_by(rank) for rank in range(self._num_nodes)]
        for body in self._records.look(keys) if keys else ():
            end = PlaceRanges.from_json(body).end_of(self._next)
            if end is not None:
                return end
        return None

    def _withdrawn_by(self, node_rank: int) -> str:
        return self._key(f"withdrawn/{node_rank}")

    def _key(self, name: str) -> str:
        return f"{self._generation}/journal/{name}"
