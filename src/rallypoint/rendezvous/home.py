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


# What nodes that come or wait are told when no further one is needed.
ENDED_WELL = "the job has ended well"


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRound:
    """What a node remembers of the round it is (or wants to be) a member of, should the store be lost.

    Args:
        plan: as it was published.
        node_id: this node's.
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
        moved: whether it is another place than before.
        dead: ids of nodes found to have ended meanwhile.
    """

    store: Store
    moved: bool
    dead: frozenset[str] = frozenset()


class Server(Protocol):
    """A ``TCPStore`` that this node serves."""

    def close(self) -> None: ...


# Gets all ready to serve a store on a bound socket, which may block for seconds; what it returns begins at once.
Prepare = Callable[[socket.socket], Callable[[], Server]]


class Home(Protocol):
    """Calls block until ``deadline``, or until ``stop`` is set; both end in ``RendezvousConnectionError``."""

    @property
    def host(self) -> str | None:
        """The node's host that serves the store; None if no node does."""

    @property
    def serves(self) -> bool:
        """Whether this node serves the store: it ends with it."""

    def connect(self, deadline: Deadline, stop: threading.Event) -> Store:
        """The first connection. Time that a node needs to start is no time to wait: it moves the deadline."""

    def recover(
        self,
        error: RendezvousConnectionError,
        last: LastRound | None,
        deadline: Deadline,
        stop: threading.Event,
    ) -> Recovery:
        """A connection again after ``error``."""

    def visit(self, addr: str, port: int) -> Store | None:
        """A connection to the store at the place a note leads to; None if nobody serves there any more.

        Raises:
            RendezvousConnectionError: it does not answer; later it may.
        """

    def follow(self, addr: str, port: int) -> None:
        """The job's store is known to be elsewhere now."""

    def redirect(self, store: Store) -> None:
        """Leave notes to the job's store in those that this node still serves beside it."""

    def standby(self, addr: str) -> Mapping[str, Any]:
        """What others must know to find the store here, should it move here; empty if it never does."""

    def towards(self) -> tuple[str, int] | None:
        """A host that all nodes reach: our address on the way there is the one to tell others."""

    def clear(self, store: Store, *, well: bool) -> None:
        """The job is over and this is its last node: remove what it has left in a store that outlives it.

        Args:
            store: a connection.
            well: the job has ended well; who comes too late may be told.
        """

    def close(self) -> None:
        """Let go of everything; a store served here ends."""
