"""Losses that strike as soon as a session trains.

Workers start to train together before each supervisor has heard that those of all other nodes are in their session, too. A
loss at that moment waits until the supervisor has heard. Otherwise, a worker that could be replaced would end the job.
"""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.launch import policy

from .event_loop import EventLoop
from .situation import Situation


# How long news from other nodes may be on its way.
PATIENCE = 2.0


class EarlyLosses:
    """Holds such losses back.

    Args:
        loop: the supervisor's loop.
        now: this node's situation.
        decide: decides on an event.
    """

    def __init__(
        self, loop: EventLoop, now: Situation, decide: Callable[[policy.Event], None]
    ) -> None:
        self._loop = loop
        self._now = now
        self._decide = decide
        self._held: list[policy.Event] = []

    def decide(self, loss: policy.WorkerEnded | policy.PeerLost) -> None:
        """Decide on a loss, now or as soon as the news has arrived."""
        is_own = isinstance(loss, policy.PeerLost) and loss.is_own
        if not is_own and policy.awaits_sessions(self._now.state):
            self._held.append(loss)
            self._loop.after(PATIENCE, self._release)
        else:
            self._decide(loss)

    def heed_news(self) -> None:
        """A node has said that its workers are in a session."""
        if self._held and not policy.awaits_sessions(self._now.state):
            self._release()

    def forget(self) -> None:
        """The generation is over."""
        self._held.clear()

    def _release(self) -> None:
        held, self._held = self._held, []
        for loss in held:
            self._decide(loss)
