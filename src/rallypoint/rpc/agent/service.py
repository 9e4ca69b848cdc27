"""What a worker does for the requests of its peers, beyond each request's own way from arrival to answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rallypoint.rpc.connections.incoming import Incoming
from rallypoint.rpc.crew.crew import TICK, Crew, Job
from rallypoint.rpc.crew.errands import Errand
from rallypoint.wire.frames import Frame

from .coroutine_loop import CoroutineLoop
from .serving import Request
from .streams import WINDOW, WINDOW_NAME, ItemSource


if TYPE_CHECKING:
    from .agent import Agent

# A function that was long is tried by the leader again after it was short so many times.
_SHORT_AGAIN = 8


class Service:
    """Where requests find threads: the crew's, the event loop's, or one of a stream's own; and what they count.

    Args:
        agent: what requests are given.
        crew: its threads.
        name: for the name of the event loop's thread.
    """

    def __init__(self, agent: Agent, crew: Crew, name: str) -> None:
        self._agent = agent
        self._crew = crew
        self._counters = agent.counters
        self._count_done = agent.done.add
        self.loop = CoroutineLoop(name)
        self.long_ones: dict[Any, int] = {}

    def new_job(self, incoming: Incoming, frame: Frame) -> Job:
        return Request(self._agent, incoming, frame)

    # -- whose thread does it -----------------------------------------------------------------------

    def is_long(self, target: Any) -> bool:
        """Whether a function took long when it was last called."""
        if not self.long_ones:
            return False
        try:
            return self.long_ones.get(target, 0) > 0
        except TypeError:
            return False

    def note_length(self, target: Any, seconds: float) -> None:
        try:
            if seconds > TICK:
                if len(self.long_ones) < 4096:
                    self.long_ones[target] = _SHORT_AGAIN
            elif target in self.long_ones:
                self.long_ones[target] -= 1
                if self.long_ones[target] <= 0:
                    del self.long_ones[target]
        except (TypeError, KeyError):
            return

    def hand_over(self, job: Job) -> bool:
        """Have a job done by a worker, if this is the leader's thread."""
        if not self._crew.leads():
            return False
        self._crew.submit(job)
        return True

    def stream(
        self,
        request: Request,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> None:
        """Run a generator on a thread of its own: it waits for its consumer."""
        kwargs = dict(kwargs or {})
        source = ItemSource(request, int(kwargs.pop(WINDOW_NAME, WINDOW)))
        self._crew.submit(Errand(lambda: source.run(func, args, kwargs)))

    # -- what it comes to ---------------------------------------------------------------------------

    def served(self, arrived: float, *, failed: bool, is_user: bool = True) -> None:
        counters = self._counters
        counters.served += 1
        if is_user:
            self._count_done()
        if failed:
            counters.failed += 1
        counters.note(time.monotonic() - arrived)


def read_foreign(content: Any) -> Any:
    """What a pickler that user code has put in place of ours has written."""
    from rallypoint.rpc import api

    data, tensors = content
    call = api._default_pickler.deserialize(data, tensors)  # torch's name
    return call.func, call.args, call.kwargs
