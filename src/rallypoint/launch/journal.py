"""One generation's journal: entries that nodes write and all read in the same order.

So every node sees the same first failure and comes to the same decision by itself. An entry takes its
place by adding to a counter and is then put there if nothing is: two operations, however many write at
once. Whoever dies between the two leaves a hole; the next reader that has waited a while in front of it fills it
with nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from rallypoint.rendezvous.record_store import RecordStore


class Journal:
    """One connection's view of it.

    Args:
        records: the connection.
        generation: whose journal this is.
    """

    def __init__(self, records: RecordStore, generation: int) -> None:
        self._records = records
        self._generation = generation
        self._next = 0

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write an entry at the end."""
        # The id makes it ours: an equal entry of another writer must not pass for it.
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
