"""The store that the members of a group meet in."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as torch_distributed

from rallypoint._core import env
from rallypoint._core.addresses import check_host, is_this_host
from rallypoint.errors import ConfigError


# torch re-exports its names by *.
dist: Any = torch_distributed
# With these torch's store waits for all workers, unless the address says that there are any number.
_WAITING = ("env", "tcp")


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
        rank: 0 hosts a TCP store; negative: whoever comes first on its host does.
        timeout: seconds to wait for it; 0: c10d's default.
        torch_rules: a rank must be given, and is asked for in torch's words.

    Raises:
        ConfigError: it is none of these.
    """
    limit = timedelta(seconds=timeout) if timeout else dist.constants.default_pg_timeout
    _check_host(init_method)
    if (rank >= 0 and world_size) or (torch_rules and rank < 0):
        # torch's own way, so that every scheme that it knows, or was taught, works. But the store is not to wait
        # for all workers: that cannot be interrupted, and does not say who is missing. The group waits for them.
        url = urlsplit(init_method)
        if (
            rank >= 0
            and url.scheme in _WAITING
            and "rank=" not in url.query
            and "world_size=" not in url.query
        ):
            url = url._replace(query=f"{url.query}&rank={rank}&world_size=-1".lstrip("&"))
            init_method, rank, world_size = url.geturl(), -1, None
        found = dist.rendezvous(init_method, rank, world_size or -1, timeout=limit)
        return next(iter(found))[0]
    url = urlsplit(init_method)
    match url.scheme:
        case "file":
            return dist.FileStore(url.path, -1)
        case "tcp":
            return _tcp(str(url.hostname), url.port, limit, rank)
        case "env":
            host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
            if host is None or port is None:
                raise ConfigError(
                    "init_method",
                    init_method,
                    "needs MASTER_ADDR and MASTER_PORT in the environment",
                    "start the workers with rally run, or set them",
                )
            return _tcp(host, int(port), limit, rank)
        case _:
            pass
    raise ConfigError(
        "init_method", init_method, "expected env://, tcp://host:port or file:///path"
    )


def _tcp(host: str, port: int | None, limit: timedelta, rank: int) -> Any:
    """Rank 0 serves it; without ranks, whoever comes first on the store's host."""
    if port is None:
        raise ConfigError("init_method", f"tcp://{host}", "expected a port: tcp://host:port")
    if rank == 0:
        return dist.TCPStore(host, port, None, True, limit, wait_for_workers=False)
    if rank < 0 and is_this_host(host):
        try:
            return dist.TCPStore(host, port, None, True, limit, wait_for_workers=False)
        except (RuntimeError, OSError):
            # Somebody serves it already.
            pass
    return dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)


def _check_host(init_method: str) -> None:
    """Tell at once of a name that is nobody's: c10d tries it until the time is up."""
    url = urlsplit(init_method)
    host = env.get("MASTER_ADDR") if url.scheme == "env" else url.hostname
    if url.scheme in ("env", "tcp") and host:
        check_host(host, "MASTER_ADDR" if url.scheme == "env" else "init_method")


def prefixed(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)
