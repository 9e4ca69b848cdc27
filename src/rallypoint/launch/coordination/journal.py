"""One generation's journal: any node may append an entry, and all nodes read the entries in the same order.

So every node sees the same first failure and reaches the same decision on its own. A writer increments a counter to
reserve a place, then claims that place: two operations, regardless of the number of writers. A writer that dies between
the two leaves a hole. The next reader that has waited there long enough fills the hole with an empty entry.

An entry that matters only for a moment, such as a question, is withdrawn by its writer: somebody may ask every two seconds
for weeks. Its place becomes a hole; the writer's list of withdrawn places tells it from a hole that is still to be filled.

A store may lose all keys (etcd's lease ran out in an outage, somebody deleted the prefix). Then writers start again at
place 0. So do readers, once no entry arrives and they see that the first entry that they read is gone. They skip
entries that they have already read.

A thousand nodes may each append an entry at the same time. A reader that is behind reads many places at once.
"""

from __future__ import annotations

import collections
import uuid
from collections.abc import Mapping
from typing import Any, Final

from rallypoint.rendezvous.record_store import RecordStore

from .place_ranges import PlaceRanges


# The most places in a journal. A counter beyond this was not counted up by nodes.
MAX_PLACES: Final = 1 << 48
# In place of a node's rank: a process that asks without being a member.
OUTSIDE: Final = -1
# At most this many places are read at once.
MAX_AHEAD: Final = 32
# What fills a hole.
_NOTHING: Final = {"what": "nothing"}


class Journal:
    """The journal, read and written over one connection.

    Args:
        records: the connection.
        generation: the generation it belongs to.
        num_nodes: how many nodes are in that generation; only readers need it.
    """

    def __init__(self, records: RecordStore, generation: int, num_nodes: int = 0) -> None:
        self._records = records
        self._generation = generation
        self._num_nodes = num_nodes
        self._next = 0
        self._read: set[str] = set()  # ids of entries, except those that matter only for a moment
        self._mark: tuple[int, str] | None = None  # place and id of the first of them
        # Entries that were read but not asked for yet.
        self._ahead: collections.deque[dict[str, Any]] = collections.deque()
        self._in_a_row = 0  # entries since the reader had to wait in vain, or found nothing ahead
        self.was_lost = False  # entries that nobody here has read may be gone

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
            place: the entry's place.
            node_rank: this node's rank.
            withdrawn: all places that it has withdrawn in this generation; this one is added.
        """
        withdrawn.add(place)
        # In this order: a reader that finds the hole must find the reason.
        self._records.write(self._withdrawn_by(node_rank), withdrawn.to_json())
        self._delete(place)

    def withdraw_from_outside(self, place: int) -> None:
        """Note an entry of a process that is not a member, and remove the one before it, perhaps from another such process.

        Args:
            place: the entry's place.
        """
        before: Any = None

        def noted(held: Mapping[str, Any] | None) -> Mapping[str, Any]:
            nonlocal before
            withdrawn, before = PlaceRanges.from_json(held), (held or {}).get("last")
            if type(before) is int:
                withdrawn.add(before)
            return {**withdrawn.to_json(), "last": place}

        self._records.improve(self._withdrawn_by(OUTSIDE), noted)
        if type(before) is int:
            self._delete(before)

    def _delete(self, place: int) -> None:
        self._records.delete(self._key(str(place)))

    def next(self, timeout: float) -> dict[str, Any] | None:
        """The next entry; None if none arrived within ``timeout`` seconds."""
        key = self._key(str(self._next))
        self._read_ahead()
        if self._ahead:
            entry: dict[str, Any] | None = self._ahead.popleft()
        else:
            entry = self._records.wait(key, timeout)
        if entry is None:
            self._in_a_row = 0
            places = self._records.count(self._key("places"), MAX_PLACES)
            if self._is_lost(places):
                self._next, self._mark, self.was_lost = 0, None, True
                return None
            if places <= self._next:
                return None
            if (end := self._end_of_withdrawn(self._next)) is not None:
                self._next = end
                return _NOTHING
            entry = self._records.claim(key, _NOTHING)
        self._in_a_row += 1
        place, self._next = self._next, self._next + 1
        return entry if self._is_new(place, entry) else _NOTHING

    def _read_ahead(self) -> None:
        """Read several entries at once if more than one has arrived recently. A single one is waited for instead."""
        if self._ahead or self._in_a_row < 2:
            return
        places = range(self._next, self._next + min(self._in_a_row, MAX_AHEAD))
        for entry in self._records.look([self._key(str(place)) for place in places]):
            if entry is None:
                break  # not there yet, or a hole
            self._ahead.append(entry)
        if not self._ahead:
            self._in_a_row = 0

    def _is_lost(self, places: int) -> bool:
        """Whether what this reader has read is no longer in the store, given the counter."""
        if self._mark is None:
            return places < self._next
        # The counter alone cannot tell: it may have been reset, and there may be as many entries again.
        place, read = self._mark
        (held,) = self._records.look([self._key(str(place))])
        if held is None and self._end_of_withdrawn(place) is not None:
            self._mark = None  # another one will do
            return False
        return held is None or held.get("id") != read

    def _is_new(self, place: int, entry: Mapping[str, Any]) -> bool:
        """Whether an entry is new to this reader. Marks it as read."""
        name = entry.get("id")
        if not isinstance(name, str) or entry.get("what") == "asked":
            return True
        self._mark = self._mark or (place, name)
        known = name in self._read
        self._read.add(name)
        return not known

    def _end_of_withdrawn(self, place: int) -> int | None:
        """The first place after the range of withdrawn ones that this one is in; None: it was not withdrawn."""
        ranks = (OUTSIDE, *range(self._num_nodes))
        keys = [self._withdrawn_by(rank) for rank in ranks] if self._num_nodes else []
        for body in self._records.look(keys) if keys else ():
            end = PlaceRanges.from_json(body).end_of(place)
            if end is not None:
                return end
        return None

    def _withdrawn_by(self, node_rank: int) -> str:
        return self._key(f"withdrawn/{node_rank}")

    def _key(self, name: str) -> str:
        return f"{self._generation}/journal/{name}"
