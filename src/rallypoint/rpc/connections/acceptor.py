"""Listeners, and connections that have not authenticated yet."""

from __future__ import annotations

import functools
import logging
import resource
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rallypoint._core import forks
from rallypoint._core.half_open import HalfOpen, room
from rallypoint.errors import RpcError
from rallypoint.rpc.groups.roster import Roster
from rallypoint.rpc.options import NativeRpcBackendOptions
from rallypoint.rpc.threads.poller import READ, Poller
from rallypoint.rpc.threads.thread_pool import Job, ThreadPool
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.wire import tls, transports
from rallypoint.wire.transport import EXHAUSTED, Address, ListenConfig, Reach, Way

from .connections import Connections
from .handshake import PATIENCE, Introduced, Welcome
from .lines import Lines


logger = logging.getLogger(__name__)

# Connections accepted in one go, before other connections are served again.
_AT_ONCE = 16
# Handling a timeout this many seconds late means that this process was stopped.
_STOOD_STILL = 1.0
# Seconds until the next accept after one fails, for example for lack of descriptors.
_PAUSE_SECONDS = 0.25
# Seconds from a crowded port to the warning: the first one, and later ones.
_FIRST_WARNING, _NEXT_WARNING = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Site:
    """Where a worker is for the other members of its group.

    Args:
        addr: the address for workers on other hosts.
        bind: the address to listen on; None: all addresses of this machine.
        one_host: all members are on this host.
    """

    addr: str
    bind: str | None = None
    one_host: bool = False


class Acceptor:
    """Accepts connections from other workers.

    Args:
        connections: receives each connection once it has authenticated.
        roster, lines, secret, seals, ways, identity: as for :class:`Dialer`.
        later: calls a function after a delay in seconds.
    """

    def __init__(
        self,
        connections: Connections,
        poller: Poller,
        pool: ThreadPool,
        roster: Roster,
        lines: Lines,
        secret: bytes,
        seals: Sequence[str],
        ways: Sequence[Way],
        identity: tls.Identity | None,
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._later = later
        self._connections = connections
        self._poller = poller
        self._pool = pool
        self._roster = roster
        self._lines = lines
        self._secret = secret
        self._seals = seals
        self._ways = ways
        self._identity = identity
        self.listeners: list[_Door] = []
        # Transports that cannot be used, and why.
        self.skipped: dict[str, str] = {}
        self._lock = threading.Lock()
        # Under the lock:
        self._half_open: dict[_Door, HalfOpen[Welcome]] = {}
        self._closed = False
        # Connections closed to make room for others since the last warning, by listener and source.
        self._crowded_out: Counter[tuple[str, str]] = Counter()
        self._warns = False
        self._warn_in = _FIRST_WARNING

    @property
    def strangers(self) -> list[Welcome]:
        """Connections that have not authenticated yet."""
        with self._lock:
            return [each for some in self._half_open.values() for each in some]

    # -- listening ----------------------------------------------------------------------------------

    def open(self, options: NativeRpcBackendOptions, site: Site) -> dict[str, Address]:
        """Listen, but accept nothing yet.

        Args:
            site: the default addresses; options override them.

        Raises:
            RpcError: no transport can be used; the error gives the reason for each.
        """
        chosen = options.transports != transports.DEFAULT or options.bind is not None
        # Connections to an advertised address may arrive on an interface other than the one seen here.
        bind = options.bind or (None if options.advertise else site.bind)
        config = ListenConfig(
            bind=None if bind == "*" else bind,
            advertise=options.advertise or site.addr,
            ports=options.ports,
            heartbeat=options.heartbeat,
        )
        for way in self._ways:
            reach = way.transport.reach
            if (
                reach is Reach.NETWORK
                and site.one_host
                and not chosen
                and any(each.way.transport.reach is Reach.HOST for each in self.listeners)
            ):
                self.skipped[way.kind] = "all workers are on this host"
                continue
            try:
                self.listeners.append(_Door(self, way, config))
            except OSError as error:
                self.skipped[way.kind] = error.strerror or str(error)
                logger.info("transport %s is not used: %s", way.kind, error)
        if not self.listeners:
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in self.skipped.items())
            raise RpcError(f"no transport can be used ({reasons})")
        return {each.kind: each.address for each in self.listeners}

    def start(self) -> None:
        """Accept connections, including those that have arrived since :meth:`open`."""
        most = room(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        for listener in self.listeners:
            self._half_open[listener] = HalfOpen(most)
            self._poller.add(listener.fileno(), listener)

    def close(self) -> list[Welcome]:
        """Stop accepting. Returns the unauthenticated connections, for the caller to close."""
        with self._lock:
            self._closed = True
        strangers = self.strangers
        for listener in self.listeners:
            self._poller.remove(listener.fileno())
            listener.close()
        return strangers

    # -- strangers ----------------------------------------------------------------------------------

    def admit(self, listener: _Door) -> None:
        """Accept the waiting connections."""
        for _ in range(_AT_ONCE):
            try:
                sock = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._pause(listener, error)
                return
            if sock is not None:
                self._admit(listener, sock)

    def _admit(self, listener: _Door, sock: socket.socket) -> None:
        way, source = listener.way, listener.source(sock)
        stranger = Welcome(
            sock,
            self._secret,
            self._roster.introduction(),
            takes_side=way.transport.shares_memory,
            identity=self._identity if way.tls else None,
            channel=way.channel(listener.address),
            seals=() if way.transport.private else self._seals,
            accepted=functools.partial(self._accept, way.kind),
            ended=functools.partial(self._dismiss, listener),
        )
        with self._lock:
            closed = self._closed
            crowded = None if closed else self._half_open[listener].add(stranger, source)
        if closed:
            stranger.close("this worker has left the group")
            return
        if crowded is not None:
            self._crowd_out(listener, *crowded)
        self._poller.add(sock.fileno(), stranger)
        self._pool.wake_at(stranger.until)

    def _crowd_out(self, listener: _Door, victim: Welcome, source: str) -> None:
        victim.close("it made room for newer connections, and had not authenticated")
        with self._lock:
            self._crowded_out[listener.kind, source] += 1
            warns, self._warns = self._warns, True
        if not warns:
            self._later(self._warn_in, self._warn)

    def _warn(self) -> None:
        with self._lock:
            crowded, self._crowded_out = self._crowded_out, Counter()
            self._warns = False
            self._warn_in = _NEXT_WARNING
        (kind, source), most = crowded.most_common(1)[0]
        logger.warning(
            "too many unauthenticated connections: %d were closed to make room for others, %d of them by %s from %s. Members of"
            " the group can still connect",
            crowded.total(),
            most,
            kind,
            source,
        )

    def _pause(self, listener: _Door, error: OSError) -> None:
        """Stop accepting for a moment: retrying at once would busy-loop."""
        fd = listener.fileno()
        self._poller.change(fd, off=READ)
        self._later(_PAUSE_SECONDS, lambda: self._poller.change(fd, on=READ))
        advice = (
            ": give the process more descriptors (ulimit -n)" if error.errno in EXHAUSTED else ""
        )
        logger.warning(
            "this worker cannot accept connections by %s for now (%s)%s",
            listener.kind,
            error.strerror or error,
            advice,
        )

    def expire(self, now: float) -> float | None:
        """Close connections that did not authenticate in time. Returns when to call this again."""
        following: float | None = None
        for half_open in list(self._half_open.values()):
            while (oldest := self._oldest(half_open)) is not None and oldest.until <= now:
                if oldest.until <= now - _STOOD_STILL:
                    # This process was stopped, and has not yet read what arrived in the meantime.
                    with self._lock:
                        for each in half_open:
                            each.until = now + PATIENCE
                else:
                    oldest.close("it did not authenticate in time")
            if oldest is not None and (following is None or oldest.until < following):
                following = oldest.until
        return following

    def _oldest(self, half_open: HalfOpen[Welcome]) -> Welcome | None:
        with self._lock:
            return next(iter(half_open), None)

    def _dismiss(self, listener: _Door, stranger: Welcome, reason: str) -> None:
        self._poller.remove(stranger.sock.fileno())
        with self._lock:
            self._half_open[listener].remove(stranger)
        if reason:
            logger.info("a connection was refused: %s", reason)

    def _accept(
        self,
        kind: str,
        sock: tls.Connection,
        known: Introduced,
        jobs: deque[Job],
    ) -> None:
        peer, rest, side, keys = known
        if peer.get("probe"):
            # The probe has its answer. Its end says nothing about the peer: probing back would never stop.
            sock.close()
            if side is not None:
                side.close()
            return
        sharing = None
        try:
            worker = WorkerInfo(str(peer.get("name")), int(peer.get("id", -1)))
            if side is not None:
                sharing = self._lines.share(side)
            line = self._lines.line(sock, kind, keys)
        except (OSError, TypeError, ValueError, OverflowError) as error:
            # The peer is already gone, or its introduction is invalid.
            logger.info("closed a connection from %r: %s", peer.get("name"), error)
            if sharing is not None:
                sharing.close()
            elif side is not None:
                side.close()
            sock.close()
            return
        self._connections.take(line, worker, sharing, rest, jobs)


class _Door:
    """A listener in the poller.

    Raises:
        OSError: the transport cannot be used here.
    """

    def __init__(self, acceptor: Acceptor, way: Way, config: ListenConfig) -> None:
        self._acceptor = acceptor
        self.way = way
        self.kind = way.kind
        with forks.opening():
            self._listener = listener = way.listen(config)
            forks.close_in_child(self)
        self.address, self.fileno = listener.address, listener.fileno
        self.source, self.close = listener.source, listener.close

    def accept(self) -> socket.socket | None:
        """As :meth:`Listener.accept`, but every error is an OSError: the calling thread serves all peers."""
        try:
            with forks.opening():
                sock = self._listener.accept()
                return None if sock is None else forks.close_in_child(sock)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"its accept() raised {type(error).__name__}: {error}") from error

    def on_ready(self, mask: int, jobs: deque[Job]) -> None:
        del mask, jobs
        self._acceptor.admit(self)
