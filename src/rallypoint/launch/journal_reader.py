"""The thread that follows one generation's journal; and, where our workers are done, those after it.

A node whose workers have ended well and that serves the job's store stays as long as others need it: it is their
*keeper*, and follows them through whatever rounds they need.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from rallypoint._core.clock import MONOTONIC
from rallypoint.errors import RallyError, RendezvousConnectionError
from rallypoint.rendezvous.lease import Leases
from rallypoint.rendezvous.plan import ids_in, ids_key
from rallypoint.rendezvous.record_store import RecordStore

from .journal import Journal


# How long its end may take.
END_PATIENCE = 5.0
# A node that keeps the store for others believes after so many leases of silence that nobody is left.
LEASES_TO_GIVE_UP = 3


class Round:
    """What this node knows of the round it is in."""

    def __init__(self, generation: int, rank: int, num_nodes: int) -> None:
        self.generation = generation
        self.rank = rank
        self.num_nodes = num_nodes
        self.gone: set[int] = set()  # ranks that are lost or have left
        self.keeps = False  # our workers have ended well; we stay because we serve the store
        self.kept_for = generation  # then: the others' round
        self.store_lost = False
        self.unheard = False  # lost without a word: what we write nobody reads
        self.reported = False


NO_ROUND = Round(-1, -1, 0)


class Follower(Protocol):
    """Whom the reader tells; all from its thread."""

    @property
    def plan(self) -> Mapping[str, Any]:
        """Of the round this node is in."""

    def heed(self, current: Round, entry: Mapping[str, Any]) -> None:
        """An entry of this generation."""

    def heed_next_round(self, current: Round) -> None:
        """The next one has been called; told again as long as it is."""

    def heed_as_keeper(self, current: Round, entry: Mapping[str, Any]) -> None:
        """An entry of a later one, which goes on without us."""

    def nobody_is_left(self, current: Round) -> None:
        """The members for whom we keep the store are gone, and did not end well."""

    def reader_lost(self, error: RendezvousConnectionError) -> None:
        """The store is."""


class JournalReader:
    """The thread that follows one generation's journal."""

    def __init__(
        self, follower: Follower, current: Round, records: RecordStore, lease: float
    ) -> None:
        self._follower = follower
        self._round = current
        self._records = records
        self._ended = threading.Event()
        self._lease = lease
        self.first_failure: int | None = None
        self._thread = threading.Thread(target=self._run, name="rally-journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """It ends, even in the middle of a wait."""
        self._ended.set()
        self._records.close()
        self._thread.join(END_PATIENCE)

    def look(self, key: str) -> dict[str, Any] | None:
        """A record, over the reader's own connection (from its thread)."""
        return self._records.look([key])[0]

    def _run(self) -> None:
        journal = Journal(self._records, self._round.generation)
        try:
            while not self._ended.is_set() and not self._round.keeps:
                entry = journal.next(self._lease)
                if entry is None:
                    self._look_ahead()
                self._heed(entry)
            self._keep(journal)
        except RendezvousConnectionError as error:
            if not self._ended.is_set():
                self._follower.reader_lost(error)
        except RallyError as error:
            self._follower.reader_lost(RendezvousConnectionError(str(error)))

    def _heed(self, entry: Mapping[str, Any] | None) -> None:
        if entry is None or self._ended.is_set():
            return
        if entry.get("what") == "failed" and self.first_failure is None:
            node = entry.get("node")
            self.first_failure = node if isinstance(node, int) else None
        self._follower.heed(self._round, entry)

    def _look_ahead(self) -> None:
        """Whoever lost the store for a while may have gone into the next round without a word here."""
        call = self.look(f"{self._round.generation + 1}/call")
        if call is not None and "closed" not in call and not self._ended.is_set():
            self._follower.heed_next_round(self._round)

    def _keep(self, journal: Journal) -> None:
        """Our workers are done, and the others need our store: follow them through whatever rounds they need."""
        current = self._round
        members = self._ids(current.generation, self._follower.plan)
        others = [each for rank, each in enumerate(members) if rank != current.rank]
        leases: Leases[str] = Leases(self._lease * LEASES_TO_GIVE_UP)
        pause = self._lease / 2
        while not self._ended.is_set():
            entry = journal.next(pause)
            if entry is not None and current.kept_for == current.generation:
                self._heed(entry)
            elif entry is not None:
                self._follower.heed_as_keeper(current, entry)
            plan = self.look(f"{current.kept_for + 1}/plan")
            if plan is not None and "closed" not in plan:
                current.kept_for += 1
                journal = Journal(self._records, current.kept_for)
                others = list(self._ids(current.kept_for, plan)) or others
                pause = self._lease / 2
                continue
            if entry is not None or not others:
                continue
            bodies = self._records.look([f"beat/{each}" for each in others])
            beats = {
                each: number
                for each, body in zip(others, bodies, strict=True)
                if body is not None
                and body.get("left") is not True
                and isinstance(number := body.get("beat"), int)
            }
            if len(leases.observe(MONOTONIC.now(), beats)) < len(beats):
                continue
            if pause:  # what they have said before they went comes first
                pause = 0.0
                continue
            self._follower.nobody_is_left(current)
            return

    def _ids(self, generation: int, plan: Mapping[str, Any]) -> tuple[str, ...]:
        """Who is in a round."""
        return ids_in(self.look(ids_key(generation, plan)))
