"""The calls in progress of an agent: for a shutdown, which waits for them, and for users."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.rpc.connections.connections import Connections
from rallypoint.rpc.connections.incoming import Incoming
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.threads.thread_pool import ThreadPool
from rallypoint.wire.line import Line

from .coroutine_loop import CoroutineLoop


class Traffic:
    """Bytes over connections that come and go, as sums that never decrease."""

    def __init__(self) -> None:
        self._sent = self._received = 0
        self._known: dict[Line, tuple[int, int]] = {}

    def note(self, lines: Iterable[Line]) -> tuple[int, int]:
        """The bytes sent and received so far. If a connection has ended, its bytes since the last call are lost."""
        known, self._known = self._known, {}
        for line in lines:
            sent, received = known.get(line, (0, 0))
            self._known[line] = now = line.bytes_sent, line.bytes_received
            self._sent += now[0] - sent
            self._received += now[1] - received
        return self._sent, self._received


class Diagnostics:
    """Reports the calls in progress of one agent.

    Args:
        num_threads: as in the options.
    """

    def __init__(
        self, connections: Connections, pool: ThreadPool, loop: CoroutineLoop, num_threads: int
    ) -> None:
        self._connections = connections
        self._pool = pool
        self._loop = loop
        self._num_threads = num_threads
        self._traffic = Traffic()

    def is_idle(self) -> bool:
        """Whether no call is in progress, in either direction."""
        return not any(each.calls for each in self._connections.all_outgoing()) and not any(
            not each.is_idle for each in self._connections.all_incoming()
        )

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no call is in progress; False if the deadline comes first."""
        return self.is_idle() or self._connections.idle.wait(self.is_idle, deadline)

    def work(self) -> str:
        """The calls in progress, for an error."""
        own = [
            f"{call.describe()} on {each.peer!r}"
            for each in self._connections.all_outgoing()
            for call in each.calls.all()
        ]
        theirs = [
            f"{len(each.active)} from {each.peer.name!r}"
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
        """Debug information under torch's keys."""
        idle, _ = self._pool.counts()
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

    def numbers(self) -> dict[str, int]:
        """Calls in progress and in the queue, and bytes over connections so far."""
        outgoing, incoming = self._connections.all_outgoing(), self._connections.all_incoming()
        lines = [each.line for each in outgoing] + [each.line for each in incoming]
        sent, received = self._traffic.note(lines)
        return {
            "in_progress": sum(len(each.calls) for each in outgoing),
            "being_served": sum(len(each.active) for each in incoming),
            "queue": self.queue(),
            "bytes_sent": sent,
            "bytes_received": received,
        }

    def peers(self) -> list[dict[str, Any]]:
        """The connections, as plain data."""
        outgoing, incoming = self._connections.all_outgoing(), self._connections.all_incoming()
        return [_outgoing_state(each) for each in outgoing] + [
            _incoming_state(each) for each in incoming
        ]

    def queue(self) -> int:
        """Calls that wait for a thread."""
        return self._pool.counts()[1]


def _outgoing_state(outgoing: Outgoing) -> dict[str, Any]:
    return {
        "name": outgoing.peer,
        "id": outgoing.info.id,
        "direction": "out",
        "transport": outgoing.line.kind,
        "calls_under_way": len(outgoing.calls),
        "bytes_in_flight": outgoing.in_flight,
        "bytes_sent": outgoing.line.bytes_sent,
        "bytes_received": outgoing.line.bytes_received,
        **(outgoing.sharing.statistics() if outgoing.sharing else {}),
    }


def _incoming_state(incoming: Incoming) -> dict[str, Any]:
    return {
        "name": incoming.peer.name,
        "id": incoming.peer.id,
        "direction": "in",
        "transport": incoming.line.kind,
        "calls_being_served": len(incoming.active),
        "bytes_sent": incoming.line.bytes_sent,
        "bytes_received": incoming.line.bytes_received,
        **(incoming.sharing.statistics() if incoming.sharing else {}),
    }
