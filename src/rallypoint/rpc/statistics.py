"""What a worker has done so far, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .connections.incoming import Incoming
    from .connections.outgoing import Outgoing


# Upper ends of the classes in which latencies are counted, in seconds; the last class is open.
BOUNDS: tuple[float, ...] = tuple(1e-5 * 2**k for k in range(24))
# Gathering is done by functions of this module.
_OWN_MODULE = "rallypoint.rpc.api"


def is_own(target: Any) -> bool:
    """Whether a call of this function is the package's own: a shutdown does not look for those."""
    return getattr(target, "__module__", None) == _OWN_MODULE


@dataclass(slots=True)
class Counters:
    """Counts since the worker joined, for people: incremented without a lock, they may miss one.

    Attributes:
        sent: calls made.
        served: calls answered.
        failed: those of them that raised.
        latencies: of served calls from arrival to answer, counted by class (``BOUNDS``).
    """

    sent: int = 0
    served: int = 0
    failed: int = 0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))

    def note(self, seconds: float) -> None:
        # log2 of how often 10 microseconds fit, without a loop.
        index = int(seconds * 1e5).bit_length()
        self.latencies[min(index, len(BOUNDS))] += 1

    def quantile(self, part: float) -> float | None:
        """Seconds that this part of the served calls took at most, to a factor of 2; None before the first."""
        total: int = sum(self.latencies)
        if not total:
            return None
        seen = 0
        for index, count in enumerate(self.latencies):
            seen += count
            if seen >= part * total:
                return BOUNDS[min(index, len(BOUNDS) - 1)]
        return BOUNDS[-1]


def of_outgoing(outgoing: Outgoing) -> dict[str, Any]:
    """A connection on which this worker calls a peer."""
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


def of_incoming(incoming: Incoming) -> dict[str, Any]:
    """A connection on which a peer calls this worker."""
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
