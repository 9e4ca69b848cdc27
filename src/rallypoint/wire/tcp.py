"""TCP: between hosts. The kernel itself finds out when a peer's packets vanish."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Iterable
from typing import Any

from rallypoint._core import addresses, forks
from rallypoint._core.clock import Deadline
from rallypoint._core.half_open import source_of
from rallypoint.errors import ConfigError

from .transport import Address, ListenConfig, Reach, Transport, accepted


KIND = "tcp"
# Seconds until a second connection attempt starts beside the first; each further one waits twice as long.
_FIRST_ATTEMPT = 0.25
# The shortest time between two probes of a silent connection, in seconds.
_LEAST_PROBE = 1
# Socket option: the longest pause between two retransmissions of the same data, in milliseconds (Linux 6.15).
_TCP_RTO_MAX_MS = 44
_LEAST_RTO_MAX, _MOST_RTO_MAX = 1000, 120_000


def prepare(sock: socket.socket, heartbeat: float) -> None:
    """Send small messages at once, and end an idle connection whose host has not answered for ``heartbeat`` seconds.

    While data is in flight, :class:`~.silence.Silence` detects that. The kernel should probe at least twice in that time,
    even if a window has been closed for long. Before Linux 6.15 this cannot be set, and the kernel doubles the pause
    between probes, up to 2 minutes.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(_LEAST_PROBE, int(heartbeat // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
    count = max(1, round(heartbeat / probe) - 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    longest = min(max(int(heartbeat * 500), _LEAST_RTO_MAX), _MOST_RTO_MAX)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, longest)


class TcpListener:
    """Listens on the first port of ``ports`` that is free.

    Args:
        host: the address to bind; None: all of this machine's.
        advertise: the address that other workers connect to.
        ports: the ports to try; 0 is any free one.

    Raises:
        ConfigError: none of them can be bound.
    """

    def __init__(
        self, host: str | None, advertise: str, ports: Iterable[int], heartbeat: float
    ) -> None:
        self._advertise = advertise
        tried: list[str] = []
        for port in ports:
            try:
                self._sock = _bind(host, port)
                break
            except OSError as error:
                tried.append(f"{port}: {error.strerror or error}")
        else:
            raise ConfigError(
                "port",
                None,
                f"no port could be bound on {host or 'any address'} ({'; '.join(tried)})",
                "give another port or range, or 0 for any free one",
            )
        self._sock.setblocking(False)
        # Accepted connections inherit the options.
        prepare(self._sock, heartbeat)

    @property
    def address(self) -> Address:
        return self._advertise, self._sock.getsockname()[1]

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> socket.socket | None:
        return accepted(self._sock)

    def source(self, sock: socket.socket) -> str:
        try:
            return source_of(sock.getpeername()[0])
        except OSError:
            return "a host that has gone again"

    def close(self) -> None:
        self._sock.close()


def _bind(host: str | None, port: int) -> socket.socket:
    if host is None and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=addresses.BACKLOG, dualstack_ipv6=True
        )
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    return socket.create_server((host or "", port), family=family, backlog=addresses.BACKLOG)


def connect(address: Address, deadline: Deadline, heartbeat: float) -> socket.socket:
    """Connect to a listener.

    Raises:
        OSError: it cannot be reached.
    """
    assert isinstance(address, tuple)
    host, port = address
    # Not socket.create_connection: after a fork while it waits, the child would hold a copy of an untracked socket.
    problem = OSError(f"{host} has no address")
    for family, kind, protocol, _, found in socket.getaddrinfo(
        addresses.as_asked(host), port, type=socket.SOCK_STREAM
    ):
        try:
            sock = _connect(family, kind, protocol, found, deadline)
            break
        except OSError as error:
            problem = error
    else:
        raise problem
    try:
        prepare(sock, heartbeat)
    except OSError:
        sock.close()
        raise
    return sock


def _connect(
    family: int, kind: int, protocol: int, to: tuple[Any, ...], deadline: Deadline
) -> socket.socket:
    """Connect to one address; the first successful one of several attempts.

    A listener with a full queue drops connection requests, and the kernel repeats them after 1 s, 3 s, 7 s: too late if
    strangers keep the queue full. A new attempt sends its request at once.

    Raises:
        TimeoutError: no attempt was answered in time.
        OSError: the error of the first attempt that failed.
    """
    attempts: dict[int, socket.socket] = {}
    poller = select.poll()
    pause = _FIRST_ATTEMPT
    try:
        while True:
            with forks.opening():
                sock = forks.close_in_child(socket.socket(family, kind, protocol))
            attempts[sock.fileno()] = sock
            sock.setblocking(False)
            poller.register(sock, select.POLLOUT)
            code = sock.connect_ex(to)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            left = deadline.remaining()
            ready = poller.poll(1000 * (pause if left is None else min(pause, left)))
            if ready:
                found = attempts[ready[0][0]]
                code = found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                del attempts[found.fileno()]
                found.settimeout(deadline.remaining())
                return found
            if deadline.expired():
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            pause *= 2
    finally:
        for each in attempts.values():
            each.close()


def _listen(config: ListenConfig) -> TcpListener:
    return TcpListener(config.bind, config.advertise, config.ports, config.heartbeat)


TRANSPORT = Transport(
    kind=KIND,
    reach=Reach.NETWORK,
    listen=_listen,
    connect=lambda address, timeout, heartbeat: connect(address, Deadline(timeout), heartbeat),
)
