"""Decides where nodes go when their store is lost, from each place's answer. Pure.

The places are the old one (perhaps only a connection broke), then each *standby* of the last plan, in the plan's order
(:func:`others`). The first that is alive will serve, and is given time to start; dead ones are skipped. So all nodes
arrive at the same place without exchanging messages. A node that is not a standby also checks the endpoint's hosts,
after all others: if all members have exited, the nodes that waited meet there again.

A place is one port. A node that has served at its place and has to serve there again before the nodes have met uses the
same port, because the others know no other (:meth:`Search.way`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Answer(Enum):
    SERVES = "serves"
    ALIVE = "alive"  # its process lives but does not serve (yet)
    DEAD = "dead"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the store may be; ``node_id`` is empty for an endpoint given by the user.

    Args:
        addr: the place's host.
        port: the store's port.
        node_id: the node that would serve there.
        watch: the watch port of that node's process; 0 if there is none.
        watch_addr: the watch port's host, if it is not ``addr``.
    """

    addr: str
    port: int
    node_id: str = ""
    watch: int = 0
    watch_addr: str = ""


class Way(Enum):
    """What a node does at the place that it has chosen."""

    VISIT = "visit"  # connect to the store served there
    AGAIN = "again"  # take back a store of its own that the job had moved on from
    STANDBY = "standby"  # serve at the port that it holds for that
    BIND = "bind"  # serve at the port that it used to hold; the store it served there is gone


def others(
    old: Place,
    host_id: str,
    standbys: Sequence[Place],
    hosts: Iterable[Place],
    *,
    own: str,
    may_serve: bool,
    been: Iterable[Place],
) -> list[Place]:
    """Where the store may be if it is not at the old place, in order of preference.

    Args:
        old: where the store was.
        host_id: the node that served it; empty if unknown.
        standbys: the last plan's standbys, in its order.
        hosts: the endpoint's hosts.
        own: this node's id.
        may_serve: False: the server of the store here was lost, so the others do not count on this node.
        been: where the store was served before, by the plan or by this node's memory; it may be there again.
    """
    found = [
        place
        for place in standbys
        if place.node_id != host_id or (place.node_id == own and may_serve)
    ]
    # The node that served until now answers at the old place, if at all. But the plan may be wrong about which node that
    # is: a newcomer may have served instead, and the node that the plan names may have taken over since.
    found += [place for place in standbys if place.node_id == host_id != own]
    if own not in [each.node_id for each in found]:
        # This node cannot serve in another's place. If all start over, they do so at the original place.
        # By then, a newcomer may serve at the port of a node that has exited.
        taken = {(each.addr, each.port) for each in (old, *found) if not each.watch}
        found += [host for host in hosts if (host.addr, host.port) not in taken]
    known = {(each.addr, each.port) for each in (old, *found)}
    found += [each for each in been if (each.addr, each.port) not in known]
    return found


class Search:
    """One node's search, which may ask each place several times.

    Args:
        old: where the store was.
        host_id: the node that served it; empty if unknown.
        others: where it may be now, in order of preference: :func:`others`.
        own: this node's id.
        dead: ids of nodes whose processes are known to have exited.
        alive_patience: seconds that a live node has to start serving.
        silent_patience: the same for a node that does not answer.
    """

    def __init__(
        self,
        old: Place,
        host_id: str,
        others: Sequence[Place],
        *,
        own: str,
        dead: Iterable[str],
        alive_patience: float,
        silent_patience: float,
    ) -> None:
        self._old, self._host_id = old, host_id
        self.places = (old, *others)
        self._own = own
        self.dead = set(dead)
        # Places not to ask at all: a node that is about to leave still serves until it has left.
        self._given_up = frozenset(self.dead)
        self._patience = {Answer.ALIVE: alive_patience, Answer.SILENT: silent_patience}
        self._since: dict[Place, float] = {}
        self._unable: set[Place] = set()  # own places at which another process listens

    def is_own(self, place: Place) -> bool:
        return bool(place.node_id) and place.node_id == self._own

    def serves_itself(self, place: Place) -> bool:
        """Whether going to this place means serving there."""
        return self.is_own(place) and place not in self._unable

    def note_unable(self, place: Place) -> None:
        """Note that this node could not serve at its own place, where another process of its machine listens."""
        self._unable.add(place)

    def to_ask(self) -> tuple[Place, ...]:
        return tuple(
            place
            for place in self.places
            if not self.serves_itself(place) and self._node_at(place) not in self._given_up
        )

    def choose(self, now: float, answers: Mapping[Place, Answer]) -> Place | None:
        """Where to go: a place that serves, or our own place, to serve there; None: ask again.

        Args:
            now: on this node's clock.
            answers: the answers so far. A place that turned out to be unusable is ``SILENT``.
        """
        taken = False  # a place before this one may still start to serve
        for index, place in enumerate(self.places):
            if self.is_own(place):
                answer = answers.get(place) if place in self._unable else None
                if answer is Answer.ALIVE:
                    self._unable.discard(place)  # nothing listens there any more
                # If another process serves at this node's place, the others take it for this node.
                later = self.places[index + (place not in self._unable) :]
                serving = next((p for p in later if answers.get(p) is Answer.SERVES), None)
                if serving is not None:
                    return serving
                if not taken and place not in self._unable:
                    return place
                continue
            gone = self._node_at(place) in self._given_up
            answer = Answer.DEAD if gone else answers.get(place)
            if answer is None:
                taken = True  # it may yet answer that it serves
            elif answer is Answer.SERVES:
                if place.node_id or place is self._old or not taken:
                    return place
            elif answer is Answer.DEAD:
                if node := self._node_at(place):
                    self.dead.add(node)
            elif place is not self._old:
                taken = self._awaits(place, answer, now, taken) or taken
        return None

    def way(self, place: Place, *, standby: int | None, left: Collection[int]) -> Way:
        """What to do at a place that was chosen.

        Args:
            place: this node's own place, or one that serves.
            standby: the port that this node holds now; None: none.
            left: ports at which this node still serves stores that the job has moved on from, if the place is on its machine.
        """
        if place.port in left:
            return Way.AGAIN
        if not self.serves_itself(place):
            return Way.VISIT
        return Way.STANDBY if place.port == standby else Way.BIND

    def nobody_is_left(self, answers: Mapping[Place, Answer]) -> bool:
        """Whether all nodes that could serve are known to have exited, so that waiting nodes may start over."""
        return all(
            not self.is_own(place)
            and (self._node_at(place) in self._given_up or answers.get(place) is Answer.DEAD)
            for place in self.places
            if place.node_id or place is self._old
        )

    def _awaits(self, place: Place, answer: Answer, now: float, taken: bool) -> bool:
        # In turn: the patience for a place starts when the patience for the places before it is over.
        if taken:
            self._since[place] = now
        since = self._since.setdefault(place, now)
        return now - since < self._patience[answer]

    def _node_at(self, place: Place) -> str:
        return self._host_id if place is self._old else place.node_id
