"""Where a job's store is, and where it moves when that place is lost.

Stores kept alive from outside the job (etcd, a shared folder) stay where they are: :mod:`.fixed_home`. The embedded
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


# The reason given to late and waiting nodes when the job needs no more nodes.
ENDED_WELL = "the job has ended well"
# The reason why there is no further round when somebody stopped the job.
STOPPED = "the job was told to stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRound:
    """What a node remembers of its round, in case the store is lost.

    Args:
        plan: the round's plan.
        node_id: this node's id.
        dead: ids of nodes whose processes are known to have exited.
    """

    plan: Mapping[str, Any]
    node_id: str
    dead: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Recovery:
    """A store that can be used again.

    Args:
        store: the connection.
        moved: whether the store is in another place now.
        dead: ids of nodes whose processes were found to have exited meanwhile.
    """

    store: Store
    moved: bool
    dead: frozenset[str] = frozenset()


class Server(Protocol):
    """A ``TCPStore`` that this node serves."""

    def close(self) -> None: ...


# Prepares to serve a store on a bound socket, which may block for seconds. Calling the result starts serving at once.
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
        """The first connection. The serving node's start-up time does not count: it moves the deadline."""

    def recover(
        self,
        error: RendezvousConnectionError,
        last: LastRound | None,
        deadline: Deadline,
        stop: threading.Event,
    ) -> Recovery:
        """A new connection after ``error``."""

    def visit(self, addr: str, port: int) -> Store | None:
        """A connection to the store that a note points to; None if no store is served there any more.

        Raises:
            RendezvousConnectionError: it does not answer now, but may later.
        """

    def follow(self, addr: str, port: int, plan: Mapping[str, Any] | None) -> None:
        """Take this place as the job's store from now on.

        Args:
            plan: the last plan that this node knows, made before the move.
        """

    def redirect(self, store: Store) -> None:
        """Leave notes that point to the job's store in other stores that this node still serves."""

    def standby(self, addr: str) -> Mapping[str, Any]:
        """What other nodes need to find the store if it moves to this node; empty if it cannot."""

    def towards(self) -> tuple[str, int] | None:
        """A host and port that all nodes can reach. A node announces its local address on the route there."""

    def clear(self, store: Store, *, well: bool) -> None:
        """Remove the job's keys from a store that outlives the job. Called by the job's last node.

        Args:
            store: a connection.
            well: the job has succeeded, which late nodes may be told.
        """

    def close(self) -> None:
        """Release all resources; a store served here stops."""
