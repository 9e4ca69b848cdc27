"""Passes on what workers import: to the fork server and, from node 0, to nodes that wait.

A node that takes a lost one's place has run no worker yet. By then it has learned from the others what its workers will
import, and has imported that: otherwise, survivors would wait for it.
"""

from __future__ import annotations

from typing import Any

from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.coordination.interface import Advice, Coordination
from rallypoint.launch.server import learning
from rallypoint.launch.server.channel import Channel
from rallypoint.launch.server.learning import Report

from .event_loop import EventLoop
from .situation import Situation


# Seconds until waiting nodes are told of all imports: workers import one package after the other when they start.
DELAY = 1.0


class ImportNews:
    """Passes on what workers import.

    Args:
        config: what runs.
        loop: the supervisor's loop.
        now: this node's situation.
        coordination: the other nodes.
        server: the line to the fork server.
    """

    def __init__(
        self,
        config: LaunchConfig,
        loop: EventLoop,
        now: Situation,
        coordination: Coordination,
        server: Channel,
    ) -> None:
        self._tells = config.elastic and config.learned_preload
        self._loop = loop
        self._now = now
        self._coordination = coordination
        self._server = server
        self._known: list[Report] = []
        self._is_due = False

    def note(self, told: dict[str, Any]) -> None:
        """A worker of this node has imported a package, or is importing it."""
        self._server.send({"do": "learn", **told})
        self._add(learning.reports_in([told]))

    def heed(self, advice: Advice) -> None:
        """This node waits, and hears what the others' workers have imported."""
        for new in self._add(learning.reports_in(advice.body.get("imports"))):
            self._server.send({"do": "learn", **new.to_json()})

    def note_round(self) -> None:
        """A round has formed, maybe with another store."""
        self._tell_soon()

    def _add(self, reports: list[Report]) -> list[Report]:
        """Note reports. Returns those that are new."""
        room = learning.MOST_REPORTS - len(self._known)
        new = [each for each in reports if each not in self._known][:room]
        self._known += new
        if new:
            self._tell_soon()
        return new

    def _tell_soon(self) -> None:
        if self._tells and self._known and not self._is_due:
            self._is_due = True
            self._loop.after(DELAY, self._tell)

    def _tell(self) -> None:
        self._is_due = False
        ready = self._now.round
        if ready is not None and ready.node_rank == 0:
            self._coordination.advise({"imports": [each.to_json() for each in self._known]})
