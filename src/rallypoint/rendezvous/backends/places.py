"""Where nodes go when their store is lost, decided from the answer of each place. Pure.

The places are, in this order, the old one (perhaps only a connection broke) and each *standby* of the last plan
by rank. The first that is alive will serve, and is given time to start; dead ones are skipped. So all nodes arrive at the
same place without exchanging messages. A node that is not a standby also checks the hosts of the endpoint, after all
others: if all members have ended, the nodes that waited meet there again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """

    addr: str
    port: int
    node_id: str = ""
    watch: int = 0


class Search:
    """One node's search, which may ask each place several times.

    Args:
        old: where the store was.
        host_id: the node that served it; empty if that is not known.
        others: where it may be now, in order of preference.
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

    def is_own(self, place: Place) -> bool:
        return bool(place.node_id) and place.node_id == self._own

    def to_ask(self) -> tuple[Place, ...]:
        return tuple(
            place
            for place in self.places
            if not self.is_own(place) and self._node_at(place) not in self._given_up
        )

    def choose(self, now: float, answers: Mapping[Place, Answer]) -> Place | None:
        """Where to go: a place that serves, or our own place, to serve there; None: ask again.

        Args:
            now: on this node's clock.
            answers: the answers so far. A place that turned out to be unusable is ``SILENT``, even
                our own.
        """
        taken = False  # a place before this one may still start to serve
        for index, place in enumerate(self.places):
            if self.is_own(place):
                later = self.places[index + 1 :]
                serving = next((p for p in later if answers.get(p) is Answer.SERVES), None)
                if serving is not None:
                    return serving
                if not taken and place not in answers:
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
