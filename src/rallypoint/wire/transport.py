"""What a transport is, and which one two workers use.

A transport opens connections, and nothing else: the handshake, MACs, TLS and limits are the same for all of them. Each has
a file of its own with a :class:`Transport`; ``transports.py`` lists them.
"""

from __future__ import annotations

import enum
import errno
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, ProtocolError


Address = str | tuple[str, int]

# Errors of accept() after which the listener stays ready: it must not be retried at once.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class HungUp(ProtocolError):
    """The other end closed the connection during the handshake without giving a reason."""


class Reach(enum.Enum):
    """Which workers a transport can connect."""

    PROCESS = "process"
    """A process with itself."""
    HOST = "host"
    """Processes that run on one host."""
    NETWORK = "network"
    """Processes on any hosts."""


class Listener(Protocol):
    """Accepts connections of one transport.

    The worker calls ``accept`` from one thread, and never while the process forks.
    """

    @property
    def address(self) -> Address:
        """What other workers pass to ``connect``: a text of at most 1,024 characters, or a host and a port."""

    def fileno(self) -> int:
        """What the worker waits on.

        Returns:
            A descriptor that is readable while a connection waits.
        """

    def accept(self) -> socket.socket | None:
        """Accept the next connection. Must not block.

        Returns:
            A connected stream socket; None if the connection was refused, or has ended already.

        Raises:
            BlockingIOError: no connection waits.
            OSError: descriptors or memory are exhausted. The worker tries again after a pause.
        """

    def source(self, sock: socket.socket) -> str:
        """Where an accepted connection comes from, as far as the kernel can tell.

        Connections that have not authenticated yet share a limit. If it is reached, a connection of the most frequent
        source is closed.

        Args:
            sock: what ``accept`` returned.

        Returns:
            A text for logs, such as ``host 10.0.0.7``.
        """

    def close(self) -> None:
        """Stop listening. A second call does nothing.

        Also called in forked children: there it must only close the child's own descriptors.
        """


@dataclass(frozen=True, kw_only=True)
class ListenConfig:
    """Where a worker should listen: its options, with the defaults filled in.

    Args:
        bind: the address to listen on; None: all addresses of this host.
        advertise: the address by which other hosts reach this one.
        ports: the ports to try, in this order; 0 is any free port.
        heartbeat: the worker's option, in seconds.
    """

    bind: str | None
    advertise: str
    ports: Sequence[int]
    heartbeat: float


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A way to connect two workers.

    Both ends of each connection prove that they know the group's secret, whatever the transport. After that, every byte is
    under a MAC, or goes through TLS with ``tls=``, unless the transport is ``private``.

    Args:
        kind: its name: lower-case letters, digits, ``-`` and ``_``.
        reach: which workers it can connect.
        listen: called with a :class:`ListenConfig`; returns a :class:`Listener`. Raises OSError if the transport cannot be
            used here; it is then skipped.
        connect: called with a listener's address, a timeout in seconds (None: no limit) and the worker's ``heartbeat`` in
            seconds; returns a connected stream socket. Raises OSError if that fails.
        private: whether the kernel guarantees that both ends belong to one user, and that nobody else can read or change
            what is sent.
        shares_memory: whether it is a Unix socket. Descriptors then travel beside it, and large tensors go through shared
            memory, which has no MACs: it must be ``private``.

    Raises:
        ValueError: ``kind`` cannot be a name, or memory would be shared without ``private``.
    """

    kind: str
    reach: Reach
    listen: Callable[[ListenConfig], Listener]
    connect: Callable[[Address, float | None, float], socket.socket]
    private: bool = False
    shares_memory: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", self.kind):
            raise ValueError(
                f"kind is {self.kind!r}: expected at most 32 lower-case letters, digits, - and _, a letter first"
            )
        if self.shares_memory and not self.private:
            raise ValueError(
                f"{self.kind} shares_memory: expected private=True, since memory has no MACs"
            )


@dataclass(frozen=True, slots=True)
class Way:
    """A transport as one worker uses it.

    Args:
        transport: the transport.
        tls: whether its connections go through TLS. A worker that uses TLS cannot connect to one that does not.
    """

    transport: Transport
    tls: bool = False

    @property
    def kind(self) -> str:
        """Its name among a member's addresses."""
        return f"{self.transport.kind}+tls" if self.tls else self.transport.kind

    def channel(self, address: Address) -> bytes:
        """What both ends know about a connection, and what a relay at another address cannot make them believe."""
        if self.transport.private:
            return b""
        parts = (address,) if isinstance(address, str) else address
        return " ".join((self.transport.kind, *map(str, parts))).encode()

    def listen(self, config: ListenConfig) -> Listener:
        """A new listener.

        Raises:
            OSError: the transport cannot be used here.
            ConfigError: what it needs is not available, or its address cannot be passed to others.
        """
        listener = self.transport.listen(config)
        address: object = listener.address
        match address:
            case str() | (str(), int()):
                return listener
            case _:
                listener.close()
                expected = "expected a string, or a host and a port"
                raise ConfigError(
                    "transports", self.kind, f"its address is {address!r}: {expected}"
                )

    def connect(self, address: Address, deadline: Deadline, heartbeat: float) -> socket.socket:
        """A new connection.

        Raises:
            OSError: it could not be made.
            ProtocolError: the transport is broken.
        """
        connect = self.transport.connect
        try:
            sock: object = connect(address, deadline.remaining(), heartbeat)
        except OSError:
            raise
        except Exception as error:
            raise ProtocolError(f"its connect() raised {type(error).__name__}: {error}") from error
        if not isinstance(sock, socket.socket):
            raise ProtocolError(f"its connect() returned {sock!r}, expected a connected socket")
        return sock


def accepted(listening: socket.socket) -> socket.socket | None:
    """The next connection of a listening socket, as :meth:`Listener.accept` returns it."""
    try:
        return listening.accept()[0]
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return None


class Choice(NamedTuple):
    """A transport to try, and the peer's address."""

    way: Way
    address: Address


def choose(
    ours: Sequence[Way], theirs: Mapping[str, Address], *, same_host: bool, same_process: bool
) -> list[Choice]:
    """The transports that lead to a peer, best first. Pure.

    Args:
        ours: what this worker uses, best first.
        theirs: where the peer listens, by kind.
        same_host: whether it is on this host, in namespaces that can see each other.
        same_process: whether it is this very process.
    """
    reached = {Reach.PROCESS: same_process, Reach.HOST: same_host, Reach.NETWORK: True}
    return [
        Choice(way, theirs[way.kind])
        for way in ours
        if way.kind in theirs and reached[way.transport.reach]
    ]


def why_none(ours: Sequence[Way], theirs: Mapping[str, Address]) -> str:
    """Why no transport leads to a peer, as a clause about it. Pure."""
    same = "give all workers the same tls=..."
    for way in ours:
        if way.tls and way.transport.kind in theirs:
            return f"it does not use TLS, which this worker requires: {same}"
        if replace(way, tls=True).kind in theirs and not way.tls:
            return f"it requires TLS and this worker does not use it: {same}"
    kinds = ", ".join(way.kind for way in ours)
    return f"it offers {', '.join(theirs) or 'no transport'}, and this worker may use {kinds}"
