"""The interface of a rendezvous: torchelastic's, typed."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rallypoint._core import addresses


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One node of a round.

    Args:
        rank: its node rank in this round.
        host: its host name.
        facts: what it told the other nodes (JSON values), such as its number of workers or its store's address.
    """

    rank: int
    host: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RendezvousStoreInfo:
    """Where the workers of a round find their own store (``MASTER_ADDR``, ``MASTER_PORT``).

    Args:
        master_addr: name or address of the store's host.
        master_port: the store's port.
    """

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"

    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: Any, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Agree on one address and port: node 0 writes them into ``store``, all nodes read them there.

        The port is not held between this call and its use; a handler that serves the store itself
        binds the port first and constructs the object.

        Collective over the nodes.   Blocks: until node 0 has written, at most as long as the store waits for a key.
        Args:
            rank: this node's rank.
            store: a c10d store that all nodes share.
            local_addr: the address by which the others reach this node; default: its host name.
            server_port: the port; default: one that is free on this node now.
        Returns:
            The address and port that node 0 wrote.
        """
        if rank == 0:
            addr, port = local_addr or socket.getfqdn(), server_port or _free_port()
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, addr)
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(port))
        addr = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        return RendezvousStoreInfo(addr, int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY)))


def _free_port() -> int:
    with addresses.bind_store(None, 0) as sock:
        return int(sock.getsockname()[1])


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """One agreed membership. Unpacks as ``(store, rank, world_size)``; ranks count nodes.

    Args:
        store: a c10d store with a new set of keys in each round, if the handler was made from the name of its
            backend; otherwise the backend's own :class:`Store`.
        rank: this node's rank.
        world_size: number of nodes.
        bootstrap_store_info: where workers meet, if the nodes agreed on that; otherwise None.
        members: all nodes of the round, by rank.
        generation: the round's number.
    """

    store: Any
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo | None = None
    members: Sequence[Member] = ()
    generation: int = 0

    def __iter__(self) -> Iterator[Any]:
        return iter((self.store, self.rank, self.world_size))


class RendezvousHandler(ABC):
    """One node's part in a rendezvous. Not thread-safe; calls that block have deadlines."""

    @abstractmethod
    def get_backend(self) -> str:
        """Name of the backend.

        Returns:
            The name it is registered under.
        """

    @property
    def use_agent_store(self) -> bool:
        """Whether workers may be clients of a store that an agent serves at ``bootstrap_store_info``.

        False, as in torch, unless a handler says otherwise.
        """
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round.

        Collective over the nodes.   Blocks: until the round is complete, at most for ``join_timeout`` seconds.
        Returns:
            The round.
        Raises:
            RendezvousTimeout: too few nodes arrived in time.
            RendezvousConnectionError: the store cannot be reached or served.
            RendezvousClosedError: no further round will form.
            RendezvousStateError: the store holds corrupt state.
            RendezvousGracefulExitError: the job continues without this node, which may leave.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the rendezvous is closed. Asks the store.

        Returns:
            True if no further round will form.
        """

    @abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous, for all nodes: no further round will form."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes arrived too late for the current round. Asks the store.

        Returns:
            Their number; 0 if membership is fixed.
        """

    @abstractmethod
    def get_run_id(self) -> str:
        """The job's name.

        Returns:
            The ``run_id`` of the parameters.
        """

    @abstractmethod
    def shutdown(self) -> bool:
        """Leave, and release all resources. Blocks for a few seconds at most.

        Returns:
            Whether that succeeded.
        """
