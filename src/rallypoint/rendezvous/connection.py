"""A node's connection to the job's store, wherever the store is now: found again when lost, followed when it moves."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import RendezvousConnectionError

from . import fields, notes, plan as plans
from .departures import Departures
from .guestbook import Guestbook
from .home import Home, LastRound, Recovery
from .notes import Moved
from .protocol import Node
from .record_store import RecordStore
from .records import Codec
from .round_watch import RoundWatch


_log = logging.getLogger(__name__)

# Counters of a store: the newcomers that have come to it, and those of them that no longer wait for a round.
_CAME, _SETTLED = "came", "settled"
# Seconds before a store that did not answer is tried again.
VISIT_PAUSE = 1.0


def new_name() -> str:
    """A name that no other node or store has."""
    return uuid.uuid4().hex[:16]


@dataclass(kw_only=True, slots=True)
class Standing:
    """What a node knows of itself and of the rounds so far.

    Attributes:
        node: this node between two rounds.
        plan: the plan of the last round that it was a member of; empty before its first.
        latest: the latest plan it has seen, because a spare, too, must know where the store may move.
    """

    node: Node
    plan: Mapping[str, Any] = field(default_factory=dict)
    latest: Mapping[str, Any] = field(default_factory=dict)


class Connection:
    """The connection. Its calls block as the store's do.

    Args:
        home: where the store is.
        codec: the codec of the job's records.
        standing: shared with the rendezvous; stores that are no longer served are noted here.
        guestbook: where this node introduces itself.
        departures: the members of the last round that are gone.
        watch: stopped before the connection is closed, because it holds clones of the connection.
        stop: ends all waits.
        say: prints a line to the user.
    """

    def __init__(
        self,
        home: Home,
        codec: Codec,
        *,
        standing: Standing,
        guestbook: Guestbook,
        departures: Departures,
        watch: RoundWatch,
        stop: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        self._home = home
        self._codec = codec
        self._standing = standing
        self._guestbook = guestbook
        self._departures = departures
        self._watch = watch
        self._stop = stop
        self._say = say
        self._moves = 0  # how often the store had moved when it came to where it is now
        self._due: str | None = None  # the counter to which this node adds with its next look
        self._unsettled = False  # counted as having come to the store, but not as settled
        self._elsewhere = False  # redirected to another store, which may not know our last round
        self.records: RecordStore | None = None  # None: not connected
        self.moved = False  # whether the store has moved since the last round
        self.is_new = False  # what nodes noted in the previous store is not in this one

    def open(self, deadline: Deadline) -> RecordStore:
        """The records in the store; connects first if necessary."""
        if self.records is None:
            self.records = RecordStore(self._home.connect(deadline, self._stop), self._codec)
            node = self._standing.node
            self._guestbook.visit(
                self.records.store,
                serves=self._home.serves,
                newcomer=node.generation is None,
                should_serve=node.given_rank == 0,
            )
            self._note_coming()
            if self._home.serves:
                self.records.claim("store", {"name": new_name(), "moves": 0})
        return self.records

    def close(self, *, leaving: bool) -> None:
        """Stop watching and disconnect. ``leaving``: this node leaves in good order."""
        self._watch.stop(leaving=leaving)
        if self.records is not None:
            self.records.close()
            self.records = None

    def interrupt(self) -> None:
        """End pending waits, from another thread, because the store is lost."""
        if (records := self.records) is not None:
            records.close()

    def look(self, records: RecordStore, keys: Sequence[str]) -> list[dict[str, Any] | None]:
        """As :meth:`.RecordStore.look`. If this node is to be counted, that is done in the same round trip."""
        if self._due is None:
            return records.look(keys)
        counter, self._due = self._due, None
        _, found = records.increment_and_look(counter, keys)
        self._unsettled = counter == _CAME
        return found

    def begin_round(self) -> None:
        """Note that this node is a member of a round that has formed."""
        self.moved = self.is_new = False
        if self._unsettled:
            self._due = _SETTLED

    def settle(self) -> bool:
        """Record that this node no longer waits for a round. Returns whether no other node at this store waits, either."""
        settled = self._count_settled()
        return self.records is not None and 0 < settled >= self.records.count(_CAME)

    def _count_settled(self) -> int:
        """Count this node as settled. Returns how many have settled, or 0 if it was counted before."""
        if self.records is None or not self._unsettled:
            return 0
        self._unsettled, self._due = False, None
        return self.records.increment(_SETTLED)

    def note_store(self, body: Mapping[str, Any] | None) -> None:
        """Note the record ``store``, which was read."""
        self._moves = notes.age(None, body).moves

    def check_membership(self, records: RecordStore) -> None:
        """After a redirect, keep this node's membership only if the new store has the same last round."""
        standing = self._standing
        generation = standing.node.generation
        if not self._elsewhere or generation is None:
            return
        self._elsewhere = False
        (plan,) = records.look([f"{generation}/plan"])
        # A plan that was copied into an empty store has a "+" after its author's name.
        theirs, ours = (str(each.get("by")).rstrip("+") for each in (plan or {}, standing.plan))
        if theirs != ours:
            standing.node = replace(standing.node, generation=None)

    # -- a store that has moved -----------------------------------------------------------------

    def follow(self, records: RecordStore, moved: Moved) -> None:
        """Connect to the store that a note redirects to, if it still exists."""
        found = None
        try:
            store = self._home.visit(moved.addr, moved.port)
            if store is not None:
                found = RecordStore(store, self._codec)
                age = notes.age(*found.look(["head", "store"]))
        except RendezvousConnectionError:
            # The network may be broken. Keep the note for later.
            if found is not None:
                found.close()
            self._stop.wait(VISIT_PAUSE)
            return
        standing = self._standing
        if found is None or age.store != moved.age.store:
            if found is not None:
                found.close()
            ended = standing.node.ended_stores | {moved.age.store}
            standing.node = replace(standing.node, ended_stores=ended)
            # Remove the note: it must not block another note, to an older store that still exists.
            note = notes.written(moved)
            records.improve("moved", lambda held: {} if held == note else None)
            return
        self._say(f"the job's store has moved to {moved.addr}:{moved.port}; connecting there")
        self._home.follow(moved.addr, moved.port, self._last_plan())
        self.close(leaving=False)
        self.records = found
        self._moves = age.moves
        self._elsewhere = self.is_new = True
        newcomer = standing.node.generation is None
        self._guestbook.visit(found.store, serves=False, newcomer=newcomer)
        self._home.redirect(found.store)

    # -- a store that is lost -------------------------------------------------------------------

    def recover(self, error: RendezvousConnectionError, deadline: Deadline) -> None:
        """Connect again, to this store or its successor, or raise."""
        while True:
            try:
                self._try_recover(error, deadline)
                return
            except RendezvousConnectionError as again:
                if self._stop.is_set() or self.records is None or deadline.expired():
                    raise
                error = again  # the store was found, but lost again at once

    def _try_recover(self, error: RendezvousConnectionError, deadline: Deadline) -> None:
        _log.info("%s; looking for it", error)
        self.close(leaving=False)
        standing = self._standing
        last = None
        if plan := self._last_plan():
            ended = self._departures.ended()
            last = LastRound(plan=plan, node_id=standing.node.node_id, dead=ended)
        recovery = self._home.recover(error, last, deadline, self._stop)
        if recovery.moved and last is not None:
            # The node that served the store was silent for too long. If it is alive, it will come on its own.
            self._departures.note_gone(str(last.plan.get("store", "")))
        self.adopt(recovery)

    def _last_plan(self) -> Mapping[str, Any] | None:
        standing = self._standing
        return standing.latest if standing.node.generation is None else standing.plan

    def adopt(self, recovery: Recovery) -> None:
        """Continue with a store that may be new. If it is empty, write the last round's records into it."""
        generation = self._standing.node.generation
        self.records = records = RecordStore(recovery.store, self._codec)
        self._departures.note_ended(recovery.dead)
        self.moved = self.moved or recovery.moved
        self.is_new = self.is_new or recovery.moved
        if recovery.moved:
            self._guestbook.visit(recovery.store, serves=self._home.serves, newcomer=False)
        if generation is None and recovery.moved:
            self._note_coming()
        (head, store) = self.look(records, ["head", "store"])
        if generation is None:
            empty = recovery.moved and self._home.serves
        else:
            empty = recovery.moved or head is None
        if empty:
            self._furnish(records, generation)
        else:
            self._moves = notes.age(head, store).moves
        self._home.redirect(records.store)

    def _furnish(self, records: RecordStore, generation: int | None) -> None:
        """Write the records of the last round that the next one needs into an empty store."""
        standing = self._standing
        if generation is None:
            latest = standing.latest
            following = 1 + fields.number(latest.get("generation")) if latest else 0
        else:
            following = generation + 1
            plan = plans.seeded(standing.plan)
            if self._departures.ids:
                records.write(plans.ids_key(generation, plan), {"ids": list(self._departures.ids)})
            records.claim(f"{generation}/plan", plan)
        moves = notes.moves_after(self._moves, by_member=generation is not None)

        def head(held: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            return {"generation": following} if fields.generation(held) < following else None

        def store(held: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            age = notes.age(None, held)
            return {"name": age.store or new_name(), "moves": moves} if age.moves < moves else None

        records.improve("head", head)
        records.improve("store", store)
        self._moves = notes.age(*records.look(["head", "store"])).moves

    def _note_coming(self) -> None:
        """Have this newcomer counted, so that a node that closes the rendezvous gives it time to learn that."""
        if self._standing.node.generation is None:
            self._due = _CAME
