"""The thread that follows the journal of a generation.

A node whose workers have succeeded stays if it serves the job's store and other nodes still need it. It is then the
*keeper*, and its reader follows the journals of their later rounds.
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


# How long the thread may take to stop.
END_PATIENCE = 5.0
# After this many leases of silence, a keeper assumes that no node is left.
LEASES_TO_GIVE_UP = 3


class Round:
    """What this node knows about its round."""

    def __init__(self, generation: int, rank: int, num_nodes: int) -> None:
        self.generation = generation
        self.rank = rank
        self.num_nodes = num_nodes
        self.gone: set[int] = set()  # ranks that are lost or have left
        self.keeps = False  # this node is the keeper
        self.kept_for = generation  # as the keeper: the round of the others
        self.store_lost = False
        self.unheard = False  # the store was lost: entries of this node are not read
        self.reported = False
        self.said_farewell = False  # this node leaves, and the store that it serves ends with it


NO_ROUND = Round(-1, -1, 0)


class Follower(Protocol):
    """Receives what the reader finds. All methods are called in the reader's thread."""

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan of this node's round."""

    def heed(self, current: Round, entry: Mapping[str, Any]) -> None:
        """An entry of this generation."""

    def heed_next_round(self, current: Round) -> None:
        """The next round has been called. Repeated until this node joins it."""

    def heed_closed(self, current: Round, reason: str) -> None:
        """There will be no next round, and what the journal said about that may be lost. Repeated until this node exits."""

    def heed_as_keeper(self, current: Round, entry: Mapping[str, Any]) -> None:
        """An entry of a later round that this node is not part of."""

    def nobody_is_left(self, current: Round) -> None:
        """The members for whom this node keeps the store are gone without success."""

    def reader_lost(self, current: Round, error: RendezvousConnectionError) -> None:
        """The connection to the store is lost."""


class JournalReader:
    """Follows the journal of one generation in a thread of its own.

    Args:
        follower: receives what it finds.
        current: this node's round.
        records: a connection for this thread alone; closed at the end.
        lease: seconds of silence after which a node is lost.
    """

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
        """Stop the thread, even if it is waiting."""
        self._ended.set()
        self._records.close()
        self._thread.join(END_PATIENCE)

    def look(self, key: str) -> dict[str, Any] | None:
        """Read a record over the reader's connection. Called in its thread."""
        return self._records.look([key])[0]

    def mark(self, key: str) -> None:
        """Write an empty record over the reader's connection. Called in its thread."""
        self._records.write(key, {})

    def _run(self) -> None:
        journal = Journal(self._records, self._round.generation, self._round.num_nodes)
        try:
            while not self._ended.is_set() and not self._round.keeps:
                entry = journal.next(self._lease)
                if entry is None:
                    self._look_ahead(journal)
                self._heed(entry)
            self._keep(journal)
        except RendezvousConnectionError as error:
            if not self._ended.is_set():
                self._follower.reader_lost(self._round, error)
        except RallyError as error:
            self._follower.reader_lost(self._round, RendezvousConnectionError(str(error)))

    def _heed(self, entry: Mapping[str, Any] | None) -> None:
        if entry is None or self._ended.is_set():
            return
        if entry.get("what") in {"failed", "hangs"} and self.first_failure is None:
            node = entry.get("node")
            self.first_failure = node if isinstance(node, int) else None
        self._follower.heed(self._round, entry)

    def _look_ahead(self, journal: Journal) -> None:
        """Check for the next round: nodes that had lost the store may have called it without an entry here."""
        call = self.look(f"{self._round.generation + 1}/call")
        if call is None or self._ended.is_set():
            return
        if "closed" not in call:
            self._follower.heed_next_round(self._round)
        elif journal.was_lost:
            # Otherwise an entry says why, and the members may still be busy exiting.
            self._follower.heed_closed(self._round, str(call["closed"]))

    def _keep(self, journal: Journal) -> None:
        """Follow the later rounds of the nodes that still need this node's store."""
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
                others = list(self._ids(current.kept_for, plan)) or others
                journal = Journal(self._records, current.kept_for, len(others))
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
            if pause:  # first read the entries that they left
                pause = 0.0
                continue
            self._follower.nobody_is_left(current)
            return

    def _ids(self, generation: int, plan: Mapping[str, Any]) -> tuple[str, ...]:
        """The members of a round."""
        return ids_in(self.look(ids_key(generation, plan)))
