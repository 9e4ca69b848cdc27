"""The way to the other nodes, looked up on this machine for :mod:`.placement.network`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from rallypoint._core import addresses
from rallypoint._core.interfaces import Interface, interfaces
from rallypoint.errors import ConfigError
from rallypoint.launch.placement import network


# An address of a documentation network (RFC 5737), so the default route leads there. Nothing is sent.
_ELSEWHERE = "192.0.2.1"


def choice_for(
    env: Mapping[str, str], local_addr: str | None, master_addr: str
) -> network.NetworkChoice:
    """What workers are told about the network.

    Args:
        env: the supervisor's environment.
        local_addr: this node's address, if the user has given it.
        master_addr: where the workers meet.
    """
    found = interfaces()
    name = addresses.hostname()
    reached_at = _reached_at(found, local_addr, master_addr)
    return network.choose(env, found, reached_at, name, _address_of(name))


def _reached_at(
    found: tuple[Interface, ...], local_addr: str | None, master_addr: str
) -> str | None:
    if local_addr is not None:
        return addresses.own_address(local_addr)
    if addresses.is_loopback(master_addr):
        return None  # all nodes are on this machine
    try:
        towards = addresses.address_towards(master_addr, 1)
    except ConfigError:
        return None
    if not addresses.is_loopback(towards):
        return towards
    # This machine's own name, which leads other nodes to it, but this machine to its loopback interface.
    return network.most_likely(found, addresses.address_towards(_ELSEWHERE, 1))


@functools.cache
def _address_of(name: str) -> str | None:
    return addresses.own_address(name)
