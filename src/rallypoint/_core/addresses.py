"""Sockets and addresses: bind the store's port without a race, and recognise this host."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from functools import cache
from typing import Any

from rallypoint.errors import ConfigError, LaunchError

from . import limits


# ConfigError's text for a port that is taken.
IN_USE = "the port is in use"
# Thousands of workers connect at once when a round starts; the kernel caps this at somaxconn.
BACKLOG = 4096


def bind_store(host: str | None, port: int, flag: str = "--master-port") -> socket.socket:
    """Open a listening socket for a store.

    The socket itself is passed on, so no other process can take the port before it is used.

    Args:
        host: an address of this machine to listen on, or None for all of them.
        port: the port, or 0 for any free one.
        flag: the option that set it, for the error.

    Raises:
        ConfigError: the port is in use or may not be bound, or the address is not this machine's.
        OSError: a limit of this process is reached, such as that of open files.
    """
    sock = _dual_stack() if host is None else _for_host(host, port)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = ("", port) if host is None else _resolve(host, port)[1]
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if limits.explain(error) is not None:
            raise  # not the port's fault
        if error.errno == errno.EADDRINUSE:
            problem, hint = IN_USE, "choose another one, or 0 for any free port"
        elif error.errno == errno.EACCES:
            problem, hint = "binding this port is not permitted", "choose one from 1024 up"
        elif error.errno == errno.EADDRNOTAVAIL and host is not None:
            raise ConfigError(
                "address to listen on",
                host,
                "this machine does not have it",
                "`ip addr` shows those that it has; --bind names one, or * for all",
            ) from None
        else:
            problem, hint = f"cannot listen there: {error.strerror}", ""
        raise ConfigError(flag, str(port), problem, hint) from None
    return sock


def _dual_stack() -> socket.socket:
    """A socket for IPv6 and IPv4; for IPv4 alone where the kernel has no more."""
    kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC
    try:
        sock = socket.socket(socket.AF_INET6, kind)
    except OSError:
        return socket.socket(socket.AF_INET, kind)
    try:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        sock.close()
        return socket.socket(socket.AF_INET, kind)
    return sock


def _for_host(host: str, port: int) -> socket.socket:
    family, _ = _resolve(host, port)
    return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


def as_asked(host: str) -> bytes:
    """A host's name or address as the resolver is asked for it.

    For a ``str``, Python encodes it as an international name (IDNA), and raises no ``OSError`` if that is impossible, as with
    a label of 64 letters. As bytes, the resolver says that there is no such host.
    """
    name = host.strip("[]").replace("\0", "\ufffd")
    if name.isascii():
        return name.encode()
    try:
        return name.encode("idna")
    except UnicodeError:
        return name.encode(errors="replace")


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """As ``socket.create_connection``, with no other error than ``OSError`` for a name that is none (:func:`as_asked`)."""
    return socket.create_connection((as_asked(host), port), timeout)  # type: ignore[arg-type]  # bytes are accepted


def _resolve(host: str, port: int, flag: str = "--master-addr") -> tuple[int, tuple[str, int]]:
    """The family and first address of ``host``: clients try it first too."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            as_asked(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        # With too many open files, look-ups fail as for an unknown name; this open raises the true error.
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        raise ConfigError(
            flag, host, "no such host", "check the name, or give an IP address"
        ) from None
    return family, address  # type: ignore[return-value]  # IPv6 addresses have two more fields; bind takes them


def check_host(host: str, flag: str = "--master-addr") -> None:
    """Check that the host exists.

    Raises:
        ConfigError: its name has no address.
    """
    _resolve(host, 0, flag)


def exists(host: str) -> bool:
    """Whether the name resolves (yet)."""
    return bool(_found(host))


def check_loopback(host: str) -> None:
    """Check that this machine can reach itself at ``host``. Sends nothing.

    Raises:
        LaunchError: the loopback interface is down (as in a new network namespace).
    """
    if problem := loopback_problem(host):
        raise LaunchError(
            f"this machine cannot reach itself at {host} ({problem}), and workers meet there:"
            " bring its loopback interface up (ip link set lo up)"
        )


def loopback_problem(host: str) -> str:
    """Why this machine cannot reach itself at ``host``; empty if it can. Sends nothing."""
    family, address = _resolve(host, 9)
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.connect(address)
        except OSError as error:
            if error.errno not in {errno.ENETUNREACH, errno.EADDRNOTAVAIL}:
                raise
            return error.strerror or str(error)
    return ""


@cache
def own_host() -> str:
    """This machine's name for itself: ``localhost``, or 127.0.0.1 if that name is unknown, or resolves to no address here."""
    names = ("localhost", "127.0.0.1")
    return next((name for name in names if is_this_host(name)), names[0])


def is_loopback(host: str) -> bool:
    name = host.strip("[]")
    return name == "localhost" or name == "::1" or name.startswith("127.")


def is_this_host(host: str) -> bool:
    """Whether an address of ``host`` belongs to this machine, that is, can be bound.

    Compares no names, so short names, aliases and machines without reverse DNS work.
    """
    return own_address(host) is not None


def own_address(host: str) -> str | None:
    """The first numeric address of ``host`` that belongs to this machine, or None."""
    return _own_among(_found(host))


def _found(host: str) -> list[tuple[Any, ...]]:
    """What the resolver knows of ``host``; empty if nothing."""
    try:
        return list(socket.getaddrinfo(as_asked(host), 0, type=socket.SOCK_STREAM))
    except OSError:
        return []


def _own_among(found: list[tuple[Any, ...]]) -> str | None:
    """The first of these addresses that belongs to this machine, or None."""
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
            return str(address[0])
    return None


def listening_address(bind: str | None, told: str) -> str | None:
    """The narrowest address to listen on so that others reach this machine at ``told``; None for all addresses.

    Listens on all if ``told`` has several addresses or a loopback one, because it may resolve differently elsewhere
    (many machines resolve their own name to 127.0.1.1), or an address that is not this machine's (perhaps a NAT's).

    Args:
        bind: the user's choice: an address, ``*`` for all, or None for automatic.
        told: the host that others connect to; may be empty.
    """
    if bind is not None:
        return None if bind == "*" else bind
    if is_loopback(told):
        return None
    found = _found(told) if told else []
    if len({address for *_, address in found}) != 1:
        return None
    own = _own_among(found)
    return None if own is None or is_loopback(own) else own


def reached_at(listener: socket.socket) -> str:
    """The address at which this machine reaches its own listening socket."""
    host = str(listener.getsockname()[0])
    return own_host() if host in {"0.0.0.0", "::"} else host  # noqa: S104  compared, not bound


def hostname() -> str:
    """This machine's name, for display."""
    return socket.gethostname()


def address_towards(host: str, port: int, flag: str = "--master-addr") -> str:
    """This machine's address as ``host`` sees it: the route's source address. Sends nothing."""
    family, address = _resolve(host, port or 1, flag)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(address)
        except OSError:
            return hostname()
        return str(sock.getsockname()[0])


def bind_only(host: str | None, port: int) -> socket.socket:
    """Bind a socket, which holds the port and refuses connections until it listens.

    Args:
        host: an address of this machine, or None for all of them.
        port: the port, or 0 for any free one.

    Raises:
        OSError: the port is in use.
    """
    sock = _dual_stack() if host is None else _for_host(host, port)
    try:
        # Without this, connections of a killed server would block the port for a minute. With it, two sockets
        # may bind one port; the first to listen gets it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port) if host is None else _resolve(host, port)[1])
    except OSError:
        sock.close()
        raise
    return sock
