"""The socket at which a generation's workers reach their store: bound by the supervisor, served below the fork server."""

from __future__ import annotations

import socket

from rallypoint._core import addresses
from rallypoint.errors import ConfigError
from rallypoint.launch.config import LaunchConfig


def bind(config: LaunchConfig) -> tuple[str, socket.socket]:
    """Bind the socket; the port stays ours until the store serves it.

    Returns:
        The address for the workers, empty if the rendezvous is to find it out, and the socket.

    Raises:
        ConfigError: the address is not one of this machine's, or the port is in use.
    """
    alone = config.num_nodes == 1
    # On several nodes the rendezvous finds out how the others reach this one: the names it goes by need not
    # have addresses yet.
    addr = config.master_addr or (addresses.own_host() if alone else config.local_addr or "")
    host = _listening_address(config, addr, alone=alone)
    # On several nodes the port that all know is the supervisors' own; workers meet at a free one.
    port = (config.master_port or 0) if alone else 0
    return addr, addresses.bind_store(host, port)


def _listening_address(config: LaunchConfig, addr: str, *, alone: bool) -> str | None:
    if alone and addresses.is_loopback(addr):
        addresses.check_loopback(addr)
        return addr if config.bind is None else addresses.listening_address(config.bind, addr)
    if alone and config.master_addr is not None:
        addresses.check_host(addr)
    host = addresses.listening_address(config.bind, addr or _told_address(config))
    if alone and config.bind is None and config.world_size in {None, config.workers_per_node}:
        host = addresses.own_address(addr)  # nobody connects from elsewhere, whatever it is there
    return host


def _told_address(config: LaunchConfig) -> str:
    """The address at which the other nodes will be told to reach this one; empty if it is not known."""
    meeting = config.rendezvous
    first = meeting.endpoint.hosts[:1] if meeting.endpoint is not None else ()
    host, port = (first[0].host, first[0].port) if first else (meeting.host, meeting.port)
    try:
        return addresses.address_towards(host, port) if host else ""
    except ConfigError:
        return ""
