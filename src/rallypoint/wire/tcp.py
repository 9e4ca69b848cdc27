"""TCP: between hosts. The kernel itself finds out when a peer's packets vanish."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

from rallypoint._core import forks
from rallypoint._core.addresses import BACKLOG
from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError

from .transport import EXHAUSTED, Address


KIND = "tcp"
# Between two probes of a silent connection, at least.
_LEAST_PROBE = 1
# The longest pause of the kernel between two attempts at the same data, in milliseconds (Linux 6.15).
_TCP_RTO_MAX_MS = 44
_LEAST_RTO_MAX, _MOST_RTO_MAX = 1000, 120_000


def prepare(sock: socket.socket, heartbeat: float) -> None:
    """Small messages go at once; an idle connection whose host answers nothing for ``heartbeat`` seconds ends.

    Where data is on its way, :class:`~.silence.Silence` finds that out. The kernel is to ask at least twice in that time,
    also when a window has been shut for long. Before Linux 6.15 it cannot be told, and asks after as long again as it has
    asked, 2 minutes at most.
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
        advertise: what the others are told to connect to.
        ports: the ports to try; 0 is any free one.

    Raises:
        ConfigError: none of them can be bound.
    """

    kind = KIND

    def __init__(
        self, host: str | None, advertise: str, ports: Iterable[int], heartbeat: float
    ) -> None:
        self._heartbeat = heartbeat
        self._advertise = advertise
        tried: list[str] = []
        for port in ports:
            try:
                with forks.opening():
                    self._sock = forks.close_in_child(_bind(host, port))
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

    @property
    def address(self) -> Address:
        return self._advertise, self._sock.getsockname()[1]

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> socket.socket | None:
        try:
            with forks.opening():
                sock = forks.close_in_child(self._sock.accept()[0])
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return None
        try:
            prepare(sock, self._heartbeat)
        except OSError:
            # It has gone again.
            sock.close()
            return None
        return sock

    def close(self) -> None:
        self._sock.close()


def _bind(host: str | None, port: int) -> socket.socket:
    if host is None and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    return socket.create_server((host or "", port), family=family, backlog=BACKLOG)


def connect(address: Address, deadline: Deadline, heartbeat: float) -> socket.socket:
    """Connect to a listener.

    Raises:
        OSError: it cannot be reached.
    """
    assert isinstance(address, tuple)
    host, port = address
    # Not socket.create_connection: a fork while that waits would give the child a copy that nobody knows of.
    problem = OSError(f"{host} has no address")
    for family, kind, protocol, _, found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with forks.opening():
            sock = forks.close_in_child(socket.socket(family, kind, protocol))
        try:
            sock.settimeout(deadline.remaining())
            sock.connect(found)
            break
        except OSError as error:
            sock.close()
            problem = error
    else:
        raise problem
    try:
        prepare(sock, heartbeat)
    except OSError:
        sock.close()
        raise
    return sock
