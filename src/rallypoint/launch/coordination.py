"""How this node's supervisor hears of the others: events for the supervisor's loop.

With one node there is nobody to hear of (:class:`LoneNode`); several nodes meet through a rendezvous
(:mod:`rallypoint.launch.peers`). Both look the same to the supervisor: requests return at once, what
comes of them is an event, and a descriptor becomes readable when there are events.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Protocol

from .output.failure import WorkerFailure
from .policy import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What this node brings to a round.

    Args:
        num_workers: how many it will start.
        store_addr: where the workers' store would be, if this is node 0; empty: at the address by which the
            other nodes reach this one.
        store_port: its port.
        restarts: how much of the restart budget is used, as far as we know.
        verdict: what the end of the last generation means for it.
    """

    num_workers: int
    store_addr: str = ""
    store_port: int = 0
    restarts: int = 0
    verdict: Verdict = Verdict.NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundReady:
    """All nodes are there.

    Args:
        node_rank: ours.
        workers_of_nodes: number of workers of each node, by node rank.
        master_addr: host of the workers' store.
        master_port: its port.
        restarts: how much of the restart budget is used, as all nodes count it.
        serves: the job's own store lives in this process.
    """

    generation: int
    node_rank: int
    workers_of_nodes: tuple[int, ...]
    master_addr: str
    master_port: int
    restarts: int = 0
    serves: bool = False


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """``failed``, ``stopped``, ``leaving``, ``lost``, ``waiting`` (a node, to be admitted).

    From or about a node (its rank), in a generation. ``all_done`` and ``reports`` come once every node has told.
    """

    what: str
    node_rank: int
    generation: int
    failures: tuple[WorkerFailure, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """The job has ended well while this node waited to take part."""


@dataclass(frozen=True, slots=True)
class CoordinationFailed:
    """No round can be formed any more; ``error`` says why."""

    error: Exception


@dataclass(frozen=True, slots=True)
class ServeStore:
    """This node is to serve the job's store: a process is wanted for it (see :mod:`.server.job_store`).

    Whoever takes this has to close both.

    Args:
        listener: the bound socket.
        line: the process's end of its line to this one.
    """

    listener: socket.socket
    line: socket.socket


CoordinationEvent = RoundReady | PeerEvent | NotNeeded | CoordinationFailed | ServeStore


class Coordination(Protocol):
    """What the supervisor asks of it. No call blocks, except :meth:`close` for a bounded time."""

    @property
    def serves_store(self) -> bool | None:
        """Whether this node is to serve the workers' store; None while ranks are not known."""

    @property
    def broken(self) -> bool:
        """Whether the others cannot be reached any more."""

    def fileno(self) -> int:
        """Readable when :meth:`take` has something."""

    def join(self, generation: int, facts: NodeFacts) -> None:
        """Meet the others; ends in :class:`RoundReady`, :class:`NotNeeded` or :class:`CoordinationFailed`.

        ``generation`` is the one expected; where members come and go the round tells which it is.
        """

    def tell(
        self, what: str, generation: int, failures: tuple[WorkerFailure, ...], reason: str = ""
    ) -> None:
        """``failed``, ``stopped``, ``leaving``, ``done`` or ``report`` (all failures of a generation).

        Args:
            reason: why this node fails or leaves, if no worker and no signal is the cause.
        """

    def reports(self) -> tuple[WorkerFailure, ...]:
        """The failures that nodes have reported (``report``), the root cause first."""

    def take(self) -> list[CoordinationEvent]:
        """The events that came since the last call."""

    def close(self, ending: str, if_last: str = "") -> None:
        """Leave.

        Args:
            ending: why there will be no further round, for nodes that wait for one; empty if there may be.
            if_last: the same, if all other nodes have left already.
        """


class LoneNode:
    """One node: it is always complete."""

    serves_store = True
    broken = False

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._events: list[CoordinationEvent] = []

    def fileno(self) -> int:
        return self._read

    def join(self, generation: int, facts: NodeFacts) -> None:
        charged = facts.verdict is not Verdict.NONE
        self._events.append(
            RoundReady(
                generation=generation,
                node_rank=0,
                workers_of_nodes=(facts.num_workers,),
                master_addr=facts.store_addr,
                master_port=facts.store_port,
                restarts=facts.restarts + charged,
            )
        )
        os.write(self._write, b"x")

    def tell(
        self, what: str, generation: int, failures: tuple[WorkerFailure, ...], reason: str = ""
    ) -> None:
        pass

    def reports(self) -> tuple[WorkerFailure, ...]:
        return ()

    def take(self) -> list[CoordinationEvent]:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        events, self._events = self._events, []
        return events

    def close(self, ending: str, if_last: str = "") -> None:
        os.close(self._read)
        os.close(self._write)
