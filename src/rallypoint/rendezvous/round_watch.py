"""Which nodes are watched during a round: this node's pulse, its watch port, and what happens at each beat."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import RendezvousConnectionError

from . import fields
from .departures import Departures
from .liveness import Loss, Neighbour, Pulse, WatchPost
from .record_store import RecordStore
from .round_members import neighbour, standbys_in


# How many of its predecessors a node looks up, so that it still has one to watch if several are lost together.
NUM_NEIGHBOURS = 4
# Seconds between the nodes' first beats, because each opens a connection for it.
BETWEEN_FIRST_BEATS = 0.0005
# Seconds that leaving may take.
LEAVE_PATIENCE = 2.0


class RoundWatch:
    """Watches members of the round, and lets them watch this node.

    Args:
        node_id: this node's.
        lease: seconds of silence after which a node is lost.
        departures: the members of the last round that are gone.
        on_loss: called from the pulse's thread for each member that is lost in a round.
        on_store_lost: called from that thread, once, when the store is lost; then the pulse stops.
        on_waiting: called from that thread, on rank 0, with the number of nodes that wait to be admitted.
    """

    def __init__(
        self,
        node_id: str,
        lease: float,
        departures: Departures,
        *,
        on_loss: Callable[[Loss], None],
        on_store_lost: Callable[[RendezvousConnectionError], None],
        on_waiting: Callable[[int], None],
    ) -> None:
        self._node_id = node_id
        self._lease = lease
        self._departures = departures
        self._on_loss = on_loss
        self._on_store_lost = on_store_lost
        self._on_waiting = on_waiting
        self._pulse: Pulse | None = None
        self._post: WatchPost | None = None
        self._beats = itertools.count(1)
        self._generation = -1  # the round whose members are watched
        self._proving = False  # the round is over; the pulse finds out which members exited
        self.store_lost = False  # the pulse has lost the store, and has stopped

    @property
    def port(self) -> int:
        """The port at which others watch this node."""
        assert self._post is not None
        return self._post.port

    @property
    def listens(self) -> bool:
        """Whether other nodes can watch this one."""
        return self._post is not None

    def listen(self, address: str | None) -> None:
        """Let other nodes watch this one at ``address``; None: at all of this host's addresses."""
        self._post = WatchPost(address)

    def start(self, records: RecordStore, *, member: bool, delay: float = 0.0) -> Pulse:
        """Start to beat, unless this node already does.

        Args:
            member: this node was in a round, which is over: find out which members have exited, so that the next need not wait.
            delay: seconds before the first beat.
        """
        if self._pulse is None:
            self.store_lost = False
            self._pulse = Pulse(
                records.clone,
                self._node_id,
                self._lease,
                self._heed_loss,
                self._heed_store,
                delay,
                self._beats,
            )
            self._pulse.start()
            if member:
                self._proving = True
                self._pulse.prove(self._departures.doubtful())
        return self._pulse

    def stop(self, *, leaving: bool) -> None:
        """Stop beating.

        Args:
            leaving: tell the others that this node leaves in good order; otherwise it counts as lost.
        """
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.stop(leaving=leaving, timeout=LEAVE_PATIENCE)

    def stop_ended(self) -> None:
        """Stop a pulse that lost the store, even if the node's own connection still works: the others miss its beat."""
        if self.store_lost:
            self.stop(leaving=False)

    def close(self) -> None:
        """Stop letting other nodes watch this one."""
        if self._post is not None:
            self._post.close()
            self._post = None

    def watch(
        self,
        records: RecordStore,
        generation: int,
        rank: int,
        plan: Mapping[str, Any],
        *,
        room: bool,
        read: Callable[[Sequence[str]], Sequence[Mapping[str, Any] | None]],
    ) -> None:
        """Watch the members of a round that has formed.

        Args:
            records: the job's store.
            rank: this node's.
            plan: the round's plan; its ``order`` is a list.
            room: whether the round is smaller than the job may be, so that rank 0 looks for nodes that wait.
            read: reads records, as :meth:`.RecordStore.look`.
        """
        order: Sequence[int] = plan["order"]
        count = len(order)
        ranks = [(rank - back) % count for back in range(1, min(NUM_NEIGHBOURS, count - 1) + 1)]
        found = read([f"{generation}/node/{order[each]}" for each in ranks])
        # The first beat opens a connection: not while others still join.
        delay = min((count + rank) * BETWEEN_FIRST_BEATS, self._lease / 2)
        pulse = self.start(records, member=True, delay=delay)
        nearest = [
            neighbour(each, record, generation)
            for each, record in zip(ranks, found, strict=True)
            if record is not None
        ]

        def watchable() -> Sequence[Neighbour]:
            known = {each.node_id: each for each in (*standbys_in(plan, generation), *nearest)}
            known.pop(self._node_id, None)
            return list(known.values())

        self._departures.know(watchable)
        everybody = []
        if rank == 0:
            everybody = [
                Neighbour(node_id=node_id, rank=each, host="", generation=generation)
                for each, node_id in enumerate(self._departures.ids)
                if each != rank
            ]
        self._proving, self._generation = False, generation
        look = self._look_after(generation, plan, room=room) if rank == 0 else None
        pulse.watch(nearest, everybody, look)

    def _look_after(
        self, generation: int, plan: Mapping[str, Any], *, room: bool
    ) -> Callable[[RecordStore], None]:
        """What rank 0 does at each beat: restore overwritten records, so that newcomers find the round, and notice newcomers."""
        look_for_waiting = self.look_for_waiting(generation + 1) if room else None

        def look(records: RecordStore) -> None:
            if fields.generation(records.peek("head")) <= generation:
                # Without the plan, a newcomer would start at round 0.
                if records.look([f"{generation}/plan"]) == [None]:
                    records.claim(f"{generation}/plan", plan)
                records.write("head", {"generation": generation + 1})
            if look_for_waiting is not None:
                look_for_waiting(records)

        return look

    def look_for_waiting(self, generation: int) -> Callable[[RecordStore], None]:
        """A function that reports nodes that wait for this round, whenever it is called and there are more than before."""
        known = 0
        again = Deadline(None)

        def look(records: RecordStore) -> None:
            nonlocal known, again
            waiting = records.count(f"{generation}/waiting")
            # Report them again after a lease: the round still runs, so a stranger overwrote what the report led to.
            if waiting > known or (waiting and again.expired()):
                known = waiting
                again = Deadline(self._lease)
                self._on_waiting(waiting)

        return look

    def _heed_loss(self, loss: Loss) -> None:
        if loss.neighbour.generation != self._generation:
            return  # the report was under way when the next round formed; that node may be a member of it
        self._departures.note_loss(loss)
        if not self._proving:
            self._on_loss(loss)

    def _heed_store(self, error: RendezvousConnectionError) -> None:
        self.store_lost = True
        self._on_store_lost(error)
