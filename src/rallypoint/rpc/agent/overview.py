"""What an agent has under way: for a shutdown that waits for the end of it, and for people."""

from __future__ import annotations

from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.rpc.connections.connections import Connections
from rallypoint.rpc.crew.crew import Crew
from rallypoint.rpc.statistics import of_incoming, of_outgoing

from .coroutine_loop import CoroutineLoop


class Overview:
    """Of one agent.

    Args:
        num_threads: as in the options.
    """

    def __init__(
        self, connections: Connections, crew: Crew, loop: CoroutineLoop, num_threads: int
    ) -> None:
        self._connections = connections
        self._crew = crew
        self._loop = loop
        self._num_threads = num_threads

    def is_idle(self) -> bool:
        """Whether no call is under way, in either direction."""
        return not any(each.calls for each in self._connections.all_outgoing()) and not any(
            not each.is_idle for each in self._connections.all_incoming()
        )

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no call is under way here; False if the time was up before."""
        return self.is_idle() or self._connections.quiet.wait(self.is_idle, deadline)

    def work(self) -> str:
        """The calls that are under way, for an error."""
        own = [
            f"{call.describe()} on {each.peer!r}"
            for each in self._connections.all_outgoing()
            for call in each.calls.all()
        ]
        theirs = [
            f"{len(each.active)} of {each.peer.name!r}"
            for each in self._connections.all_incoming()
            if each.active
        ]
        more = f" and {len(own) - 8} more" if len(own) > 8 else ""
        parts = []
        if own:
            parts.append(f"this worker waits for {', '.join(own[:8])}{more}")
        if theirs:
            parts.append(f"it still serves calls: {', '.join(theirs)}")
        return "; ".join(parts)

    def debug_info(self) -> dict[str, str]:
        """Under torch's names."""
        idle, _ = self._crew.counts()
        return {
            "agent.thread_pool_size": str(self._num_threads),
            "agent.num_idle_threads": str(idle),
            "agent.client_active_calls": str(
                sum(len(each.calls) for each in self._connections.all_outgoing())
            ),
            "agent.server_active_calls": str(
                sum(len(each.active) for each in self._connections.all_incoming())
            ),
            "agent.server_active_async_calls": str(self._loop.count()),
        }

    def peers(self) -> list[dict[str, Any]]:
        """The connections, as plain data."""
        outgoing, incoming = self._connections.all_outgoing(), self._connections.all_incoming()
        return [of_outgoing(each) for each in outgoing] + [of_incoming(each) for each in incoming]

    def queue(self) -> int:
        """Calls that wait for a thread."""
        return self._crew.counts()[1]
