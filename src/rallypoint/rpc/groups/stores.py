"""The store that ``init_method`` names."""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import torch.distributed as torch_distributed

from rallypoint._core import addresses, env
from rallypoint._core.clock import Deadline
from rallypoint._core.resolver import connecting_to
from rallypoint.errors import ConfigError
from rallypoint.rpc.time_limits import limit_of

from .group_store import NO_LIMIT


# torch re-exports its names by *.
dist: Any = torch_distributed
# Schemes for which torch's store waits for all workers, unless the address says world_size=-1.
_WAITING = ("env", "tcp")
# Stores that this process serves to dynamic groups, by address: others may stay in a group that it has left.
_served: dict[tuple[str, int], Any] = {}
# Seconds between attempts to reach a store that is not served yet: at first, and at most.
_SOON: Final = (0.002, 0.1)


def open_store(
    init_method: str,
    rank: int,
    world_size: int | None,
    timeout: float,
    *,
    torch_rules: bool = False,
) -> Any:
    """The c10d store that an ``init_method`` names.

    Args:
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        rank: 0 serves a TCP store; negative: the first process on the store's host does.
        timeout: seconds to wait for it; 0: c10d's default.
        torch_rules: require a rank, with torch's error.

    Raises:
        ConfigError: ``init_method`` is invalid.
        torch.distributed.DistNetworkError: the store was not served in time.
    """
    seconds = limit_of(timeout, "rpc_timeout")
    limit = (
        dist.constants.default_pg_timeout
        if seconds is None
        else min(timedelta(seconds=seconds), NO_LIMIT)
    )
    _check_host(init_method)
    url = urlsplit(init_method)
    if url.scheme == "file" and url.path:
        # c10d would make the file readable by all users.
        with contextlib.suppress(OSError):
            os.close(os.open(url.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if (rank >= 0 and world_size) or (torch_rules and rank < 0):
        # Use torch's own rendezvous, so that every scheme registered there works. But let the group wait for the workers,
        # not the store: the store's wait cannot be interrupted, and does not say which are missing.
        host = ""
        if (
            rank >= 0
            and url.scheme in _WAITING
            and "rank=" not in url.query
            and "world_size=" not in url.query
        ):
            server = _server_of(url)
            if server is not None:
                host = addresses.own_address(server[0]) or server[0]
                if not _serves(rank):
                    host = _await_server(*server, limit)
                url = url._replace(scheme="tcp", netloc=_netloc(host, server[1]))
            elif url.scheme == "env" and not torch_rules:
                raise _no_address(init_method)
            url = url._replace(query=f"{url.query}&rank={rank}&world_size=-1".lstrip("&"))
            init_method, rank, world_size = url.geturl(), -1, None
        with connecting_to(host):
            found = dist.rendezvous(init_method, rank, world_size or -1, timeout=limit)
            return next(iter(found))[0]
    if url.scheme == "file":
        return dist.FileStore(url.path, -1)
    if url.scheme not in _WAITING:
        raise ConfigError(
            "init_method", init_method, "expected env://, tcp://host:port or file:///path"
        )
    server = _server_of(url)
    if server is None and url.scheme == "tcp":
        raise ConfigError("init_method", init_method, "expected a port: tcp://host:port")
    if server is None:
        raise _no_address(init_method)
    return _tcp(*server, limit, rank)


def _no_address(init_method: str) -> ConfigError:
    return ConfigError(
        "init_method",
        init_method,
        "needs MASTER_ADDR and MASTER_PORT in the environment",
        "start the workers with rally run, set them, or give tcp://HOST:PORT as init_method",
    )


def _tcp(host: str, port: int, limit: timedelta, rank: int) -> Any:
    """Rank 0 serves it; without ranks, the first process on the store's host. It does so until the process ends."""
    own = addresses.own_address(host)
    place = own or host, port
    if place not in _served and (_serves(rank) or (rank < 0 and own is not None and _serves(0))):
        try:
            with connecting_to(place[0]):
                found = dist.TCPStore(*place, None, True, limit, wait_for_workers=False)
        except (RuntimeError, OSError):
            if rank == 0:
                raise
            # Another process already serves it.
        else:
            if port:
                _served[place] = found
            return found
    address = _await_server(host, port, limit)
    with connecting_to(address):
        return dist.TCPStore(address, port, None, False, limit, wait_for_workers=False)


def _serves(rank: int) -> bool:
    """Whether this rank serves a TCP store. None does if the launcher serves it."""
    return rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _server_of(url: SplitResult) -> tuple[str, int] | None:
    """The host and port that an ``init_method`` names; None if one is missing.

    Raises:
        ConfigError: the port is invalid.
    """
    what, host = "init_method", url.hostname
    if url.scheme == "env":
        what, host, port = "MASTER_PORT", env.get("MASTER_ADDR"), env.get("MASTER_PORT") or ""
    else:
        port = url.netloc.rpartition("]")[2].rpartition(":")[2] if ":" in url.netloc else ""
    if not host or not port:
        return None
    if not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise ConfigError(what, port, "expected a port: a number from 0 to 65535")
    return host.strip("[]"), int(port)


def _netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _await_server(host: str, port: int, limit: timedelta) -> str:
    """Wait until a TCP store is served there. Returns the numeric address that answered.

    c10d's own client retries after half a second or more, cannot be interrupted, takes twice its timeout, and prints
    pages of C++ frames when it gives up.

    Raises:
        torch.distributed.DistNetworkError: the store was not served in time.
    """
    seconds = limit.total_seconds()
    deadline, never = Deadline(seconds), threading.Event()
    pause, longest = _SOON
    while True:
        left = deadline.remaining()
        try:
            with addresses.connect(host, port, left or 0.001) as sock:
                return str(sock.getpeername()[0])
        except OSError as error:
            reason = error.strerror or str(error)
        left = deadline.remaining()
        if not left:
            raise dist.DistNetworkError(
                f"no store at {_netloc(host, port)} after {seconds:g} s ({reason}): is rank 0 running, and is this its"
                " address?"
            )
        never.wait(min(pause, left))
        pause = min(2 * pause, longest)


def _check_host(init_method: str) -> None:
    """Fail at once for an unknown host name: c10d would retry until the timeout."""
    url = urlsplit(init_method)
    host = env.get("MASTER_ADDR") if url.scheme == "env" else url.hostname
    if url.scheme in ("env", "tcp") and host:
        addresses.check_host(host, "MASTER_ADDR" if url.scheme == "env" else "init_method")


def prefixed(prefix: str, store: Any) -> Any:
    if not isinstance(store, dist.Store):
        raise TypeError(
            f"store is {store!r}: expected a store of torch.distributed, such as a TCPStore; an address belongs in the"
            " init_method of the options"
        )
    return dist.PrefixStore(prefix, store)
