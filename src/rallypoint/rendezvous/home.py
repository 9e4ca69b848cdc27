"""Where a job's store is, and where it goes when that place is lost.

Stores that others keep alive (etcd, a shared folder) stay where they are: :mod:`.fixed_home`. The embedded
``TCPStore`` lives in one of the job's own nodes and moves when that node is lost: :mod:`.backends.tcp_home`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rallypoint._core.clock import Deadline
from rallypoint.errors import RendezvousConnectionError

from .store import Store


# The reason that late and waiting nodes are given if the job needs no more.
ENDED_WELL = "the job has ended well"
# Why there is no further round if somebody has stopped the job.
STOPPED = "the job was told to stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRound:
    """What a node remembers of its round, in case the store is lost.

    Args:
        plan: the round's plan.
        node_id: this node's id.
        dead: ids of nodes that are known to have ended.
    """

    plan: Mapping[str, Any]
    node_id: str
    dead: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Recovery:
    """A store that can be used again.

    Args:
        store: the connection.
        moved: whether the store is at another place now.
        dead: ids of nodes found to have ended meanwhile.
    """

    store: Store
    moved: bool
    dead: frozenset[str] = frozenset()


class Server(Protocol):
    """A ``TCPStore`` that this node serves."""

    def close(self) -> None: ...


# Prepares serving a store on a bound socket, which may block for seconds. The result starts to serve at once.
Prepare = Callable[[socket.socket], Callable[[], Server]]


class Home(Protocol):
    """Where a job's store is. Calls block until ``deadline``, or until ``stop`` is set, and then raise
    ``RendezvousConnectionError``.
    """

    @property
    def host(self) -> str | None:
        """The host of the node that serves the store; None if no node does."""

    @property
    def serves(self) -> bool:
        """Whether this node serves the store, which then ends with it."""

    def connect(self, deadline: Deadline, stop: threading.Event) -> Store:
        """The first connection. The time that the serving node needs to start does not count: it moves the deadline."""

    def recover(
        self,
        error: RendezvousConnectionError,
        last: LastRound | None,
        deadline: Deadline,
        stop: threading.Event,
    ) -> Recovery:
        """A new connection after ``error``."""

    def visit(self, addr: str, port: int) -> Store | None:
        """A connection to the store that a note points to; None if none is served there any more.

        Raises:
            RendezvousConnectionError: it does not answer now, but may later.
        """

    def follow(self, addr: str, port: int, plan: Mapping[str, Any] | None) -> None:
        """From now on, the job's store is at this place.

        Args:
            plan: the last one that this node knows; it was made before.
        """

    def redirect(self, store: Store) -> None:
        """Leave notes that point to the job's store in other stores that this node still serves."""

    def standby(self, addr: str) -> Mapping[str, Any]:
        """What other nodes need to find the store if it moves to this node; empty if it cannot."""

    def towards(self) -> tuple[str, int] | None:
        """A host and port that all nodes reach: the local address on the route there is the one to announce."""

    def clear(self, store: Store, *, well: bool) -> None:
        """Remove the job's keys from a store that outlives it. Called by the job's last node.

        Args:
            store: a connection.
            well: the job has succeeded, which late nodes may be told.
        """

    def close(self) -> None:
        """Release all resources; a store served here ends."""
