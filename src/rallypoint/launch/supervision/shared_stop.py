"""SIGTERM to all nodes of an elastic job: the job must stop, with a last checkpoint.

SIGTERM to one node means that this node is taken away and the others go on. A cluster that ends the job tells all nodes
at about the same time. So a node that is told waits a moment for the others to be told, too, if its workers can save or
if Slurm is asked to requeue a job that was told to stop.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from rallypoint._core.signal_repeats import is_repeat
from rallypoint.launch import policy
from rallypoint.launch.coordination.interface import Coordination
from rallypoint.launch.policy import Phase

from .event_loop import EventLoop
from .kept_workers import KeptWorkers
from .situation import Situation


# Seconds from the first node that is told to the last, and how many more for each node: all of them report to one store.
MOMENT, PER_NODE = 1.0, 0.002


class SharedStop:
    """Finds out whether all nodes are told to stop.

    Args:
        loop: the supervisor's loop.
        now: this node's situation.
        kept: what is told to workers of a session.
        coordination: the other nodes.
        decide: passes an event to the policy.
        matters: whether it makes a difference even to workers that cannot save.
    """

    def __init__(
        self,
        loop: EventLoop,
        now: Situation,
        kept: KeptWorkers,
        coordination: Coordination,
        decide: Callable[[policy.Event], None],
        *,
        matters: bool,
    ) -> None:
        self._loop = loop
        self._now = now
        self._kept = kept
        self._coordination = coordination
        self._decide = decide
        self._matters = matters
        self._waits = False
        self._told_at = 0.0

    def begin(self, number: int, now: float) -> bool:
        """This node gets a signal. Returns whether it waits to hear if the others get it, too."""
        state = self._now.state
        if self._waits:
            # A repeat for the same reason changes nothing. Any other signal is in a hurry.
            passed = now - self._told_at
            repeats = state.sigterm_repeats
            return is_repeat(signal.SIGTERM, number, passed, sigterm_repeats=repeats)
        if (
            number != signal.SIGTERM
            or state.signal is not None
            or not state.elastic
            or (state.nodes < 2 and not self._matters)
            or state.phase is not Phase.RUNNING
            or not (self._matters or self._kept.can_save(self._now.workers))
        ):
            return False
        self._waits, self._told_at = True, now
        if self._kept.can_save(self._now.workers):
            self._kept.tell_of_stop(self._now.workers)
        self._coordination.tell("told", state.generation, ())
        moment = MOMENT + PER_NODE * state.nodes
        self._loop.after(moment, lambda: self._end(everywhere=False))
        return True

    def hear(self, generation: int) -> None:
        """All nodes of a generation were told to stop."""
        if generation == self._now.state.generation:
            self._end(everywhere=True)

    def _end(self, *, everywhere: bool) -> None:
        if self._waits and self._now.state.signal is None:
            self._decide(policy.SignalReceived(signal.SIGTERM, everywhere=everywhere))
