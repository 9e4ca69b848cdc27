"""Connections that have not proved themselves yet: how many a listener holds, and which one makes room. Pure.

Anybody who reaches a port can connect and say nothing. So a listener holds a limited number of such connections, and when
a new one comes it is the old ones that pay: the oldest one of the greediest source is closed. A member is through within
a few round trips, long before its turn; a stranger that holds connections open pays with its own.

A source with :data:`FAIR` connections or fewer is not greedy: else whoever shares an address with a member, and holds
single connections from many others, could have the member's closed with a second one.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar


C = TypeVar("C", bound=Hashable)

# Connections of one source that nobody minds.
FAIR = 16
# Of the descriptors that a process may have, half-open connections to one listener take one in so many.
_SHARE = 4
_LEAST, _MOST = 64, 1024


def room(descriptors: int, most: int = _MOST) -> int:
    """How many half-open connections a listener may hold.

    Args:
        descriptors: that this process may have open, in all.
        most: never more than these.
    """
    return max(_LEAST, min(most, descriptors // _SHARE))


class HalfOpen(Generic[C]):
    """Those of one listener, in the order in which they came.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: dict[C, str] = {}
        self._by_source: dict[str, dict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[C]:
        """From the oldest to the newest."""
        return iter(self._all)

    def add(self, connection: C, source: str) -> tuple[C, str] | None:
        """A new one; returns the one that is to be closed for it, and its source. It is no longer among them."""
        found = None
        if len(self._all) >= self._most:
            victim = self._victim()
            found = victim, self._all[victim]
            self.remove(victim)
        self._all[connection] = source
        self._by_source.setdefault(source, {})[connection] = None
        return found

    def remove(self, connection: C) -> None:
        """It has proved itself, or ended. A second call does nothing."""
        source = self._all.pop(connection, None)
        if source is None:
            return
        same = self._by_source[source]
        del same[connection]
        if not same:
            del self._by_source[source]

    def _victim(self) -> C:
        greediest = max(self._by_source.values(), key=len)
        return next(iter(greediest if len(greediest) > FAIR else self._all))


@functools.lru_cache(4096)
def source_of(address: str) -> str:
    """Whose connection this is, as far as an address tells.

    One host has a whole /64 of IPv6 addresses, and all of 127.0.0.0/8; an IPv4 address may be written as an IPv6 one.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return "this host" if found.is_loopback else f"{found.exploded[:19]}::/64"
        found = found.ipv4_mapped
    return "this host" if found.is_loopback else str(found)
