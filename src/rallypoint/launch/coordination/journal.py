"""One generation's journal: any node may append an entry, and all nodes read the entries in the same order.

So every node sees the same first failure and reaches the same decision by itself. A writer increments a counter to
reserve a place, then claims that place: two operations, regardless of the number of writers. A writer that dies between
the two leaves a hole. The next reader that has waited for it long enough fills it with an empty entry.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from rallypoint.rendezvous.record_store import RecordStore


class Journal:
    """The journal, read and written over one connection.

    Args:
        records: the connection.
        generation: the generation it belongs to.
    """

    def __init__(self, records: RecordStore, generation: int) -> None:
        self._records = records
        self._generation = generation
        self._next = 0

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write an entry at the end."""
        # The id distinguishes this entry from an equal one of another writer.
        mine = {**entry, "id": uuid.uuid4().hex}
        while True:
            place = self._records.increment(self._key("places")) - 1
            if self._records.claim(self._key(str(place)), mine).get("id") == mine["id"]:
                return

    def next(self, timeout: float) -> dict[str, Any] | None:
        """The next entry; None if none came within ``timeout`` seconds."""
        key = self._key(str(self._next))
        entry = self._records.wait(key, timeout)
        if entry is None:
            if self._records.count(self._key("places")) <= self._next:
                return None
            entry = self._records.claim(key, {"what": "nothing"})
        self._next += 1
        return entry

    def _key(self, name: str) -> str:
        return f"{self._generation}/journal/{name}"
