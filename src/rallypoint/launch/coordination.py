"""How this node's supervisor hears of the others: events for the supervisor's loop.

With one node there is nobody to hear of (:class:`LoneNode`); several nodes meet through a rendezvous
(:mod:`rallypoint.launch.peers`). Both look the same to the supervisor: requests return at once, what
comes of them is an event, and a descriptor becomes readable when there are events.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from .output.failure import WorkerFailure


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundReady:
    """All nodes are there.

    Args:
        node_rank: ours.
        workers_of_nodes: number of workers of each node, by node rank.
        master_addr: host of the workers' store.
        master_port: its port.
    """

    generation: int
    node_rank: int
    workers_of_nodes: tuple[int, ...]
    master_addr: str
    master_port: int


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """``failed``, ``stopped``, ``lost``; ``all_done`` and ``reports`` once every node has told.

    From a node (its rank), in a generation.
    """

    what: str
    node_rank: int
    generation: int
    failures: tuple[WorkerFailure, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CoordinationFailed:
    """No round can be formed any more; ``error`` says why."""

    error: Exception


CoordinationEvent = RoundReady | PeerEvent | CoordinationFailed


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

    def join(self, generation: int, num_workers: int, store_addr: str, store_port: int) -> None:
        """Meet the others; ends in :class:`RoundReady` or :class:`CoordinationFailed`."""

    def tell(self, what: str, generation: int, failures: tuple[WorkerFailure, ...]) -> None:
        """``failed``, ``stopped``, ``done`` or ``report`` (all failures of a generation), to everybody."""

    def reports(self) -> tuple[WorkerFailure, ...]:
        """The failures that nodes have reported (``report``) so far, in the order of the job's store."""

    def take(self) -> list[CoordinationEvent]:
        """The events that came since the last call."""

    def close(self) -> None:
        """Leave."""


class LoneNode:
    """One node: it is always complete."""

    serves_store = True
    broken = False

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._events: list[CoordinationEvent] = []

    def fileno(self) -> int:
        return self._read

    def join(self, generation: int, num_workers: int, store_addr: str, store_port: int) -> None:
        self._events.append(
            RoundReady(
                generation=generation,
                node_rank=0,
                workers_of_nodes=(num_workers,),
                master_addr=store_addr,
                master_port=store_port,
            )
        )
        os.write(self._write, b"x")

    def tell(self, what: str, generation: int, failures: tuple[WorkerFailure, ...]) -> None:
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

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
