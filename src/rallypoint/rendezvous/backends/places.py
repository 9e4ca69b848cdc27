"""Where nodes go when their store is lost, decided from the answer of each place. Pure.

The places are, in this order, the old one (perhaps only a connection broke) and each *standby* of the last plan, as it lists them
(:func:`others`). The first that is alive will serve, and is given time to start; dead ones are skipped. So all nodes
arrive at the same place without exchanging messages. A node that is not a standby also checks the hosts of the endpoint,
after all others: if all members have ended, the nodes that waited meet there again.

A place is one port. A node that has served at its place, and is to serve there once more before the nodes have met, does so at the
same port: it is the only one that the others know (:meth:`Search.way`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Answer(Enum):
    SERVES = "serves"
    ALIVE = "alive"  # its process lives, and does not serve (yet)
    DEAD = "dead"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the store may be; ``node_id`` is empty for an endpoint given by the user.

    Args:
        addr: its host.
        port: of the store.
        node_id: the node that would serve there.
        watch: the watch port of that node's process; 0 if there is none.
        watch_addr: its host, if it is not ``addr``.
    """

    addr: str
    port: int
    node_id: str = ""
    watch: int = 0
    watch_addr: str = ""


class Way(Enum):
    """What a node does at the place that it has chosen."""

    VISIT = "visit"  # connect to what is served there
    AGAIN = "again"  # a store of its own, that the job had moved on from, is the job's once more
    STANDBY = "standby"  # serve at the port that it keeps for that
    BIND = "bind"  # serve at the port that it kept for that; what it has served there has ended


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
        host_id: the node that served it; empty if that is not known.
        standbys: of the last plan, in its order.
        hosts: of the endpoint.
        own: this node's id.
        may_serve: False: what served the store here was lost, and the others do not count on this node.
        been: where the store was served before, by the plan or as this node remembers: there it may be again.
    """
    found = [
        place
        for place in standbys
        if place.node_id != host_id or (place.node_id == own and may_serve)
    ]
    # The node that has served until now answers at the old place, if it does. But the plan may be wrong about that:
    # a newcomer may have served instead, and that node be the one that has taken over since.
    found += [place for place in standbys if place.node_id == host_id != own]
    if own not in [each.node_id for each in found]:
        # We cannot serve in place of another. If all start over, they do so at the original place.
        # At the port of a node that has ended, a newcomer may serve by then.
        taken = {(each.addr, each.port) for each in (old, *found) if not each.watch}
        found += [host for host in hosts if (host.addr, host.port) not in taken]
    known = {(each.addr, each.port) for each in (old, *found)}
    found += [each for each in been if (each.addr, each.port) not in known]
    return found


class Search:
    """One node's search, which may ask each place several times.

    Args:
        old: where the store was.
        host_id: the node that served it; empty if that is not known.
        others: where it may be now, in order of preference: :func:`others`.
        own: this node's id.
        dead: ids of nodes that are known to have ended.
        alive_patience: seconds that a living node has to start serving.
        silent_patience: the same for one that does not answer.
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
        # Not asked at all: a node that is about to leave serves until it has left.
        self._given_up = frozenset(self.dead)
        self._patience = {Answer.ALIVE: alive_patience, Answer.SILENT: silent_patience}
        self._since: dict[Place, float] = {}
        self._unable: set[Place] = set()  # own places at which another process listens

    def is_own(self, place: Place) -> bool:
        return bool(place.node_id) and place.node_id == self._own

    def serves_itself(self, place: Place) -> bool:
        """Whether going to this place is to serve there."""
        return self.is_own(place) and place not in self._unable

    def note_unable(self, place: Place) -> None:
        """This node could not serve at its own place: another process of its machine listens there."""
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
                    self._unable.discard(place)  # nobody listens there any more
                # What serves there is what the others see as this node's.
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
                taken = True  # its answer may be that it serves
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
            place: this node's own, or one that serves.
            standby: the port that this node keeps now; None: none.
            left: ports at which it still serves stores that the job has moved on from, if the place is on its machine.
        """
        if place.port in left:
            return Way.AGAIN
        if not self.serves_itself(place):
            return Way.VISIT
        return Way.STANDBY if place.port == standby else Way.BIND

    def nobody_is_left(self, answers: Mapping[Place, Answer]) -> bool:
        """Whether all nodes that could serve are known to have ended, so that waiting nodes may start over."""
        return all(
            not self.is_own(place)
            and (self._node_at(place) in self._given_up or answers.get(place) is Answer.DEAD)
            for place in self.places
            if place.node_id or place is self._old
        )

    def _awaits(self, place: Place, answer: Answer, now: float, taken: bool) -> bool:
        # One after the other: the patience for a place starts when the patience for those before it is over.
        if taken:
            self._since[place] = now
        since = self._since.setdefault(place, now)
        return now - since < self._patience[answer]

    def _node_at(self, place: Place) -> str:
        return self._host_id if place is self._old else place.node_id
