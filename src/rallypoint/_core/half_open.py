"""Unauthenticated connections: how many a listener holds, and which one it drops for a new one. Pure.

Anyone who can reach a port can connect and send nothing. So a listener holds a limited number of such connections; for
a new one it closes the oldest of the source with the most. A member authenticates within a few round trips, long before
its turn; an attacker that holds connections open loses its own.

Sources with at most :data:`FAIR` connections are spared. Otherwise an attacker that shares a member's address, and holds
single connections from many others, could evict the member by opening a second one.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar


C = TypeVar("C", bound=Hashable)

# Connections that one source may hold without being singled out.
FAIR = 16
# Half-open connections to one listener may use this fraction (1/4) of the process's descriptors.
_SHARE = 4
_LEAST, _MOST = 64, 1024


def room(descriptors: int, most: int = _MOST) -> int:
    """How many half-open connections a listener may hold.

    Args:
        descriptors: this process's limit on open files.
        most: upper limit of the result.
    """
    return max(_LEAST, min(most, descriptors // _SHARE))


class HalfOpen(Generic[C]):
    """The half-open connections of one listener, in order of arrival.

    Args:
        most: how many to hold.
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
        """Add a connection. Returns the one removed for it, which the caller must close, and its source."""
        found = None
        if len(self._all) >= self._most:
            victim = self._victim()
            found = victim, self._all[victim]
            self.remove(victim)
        self._all[connection] = source
        self._by_source.setdefault(source, {})[connection] = None
        return found

    def remove(self, connection: C) -> None:
        """Remove a connection that has authenticated or ended. A second call does nothing."""
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
    """The source of a connection by its address.

    A /64 of IPv6 addresses counts as one host, and so does all of 127.0.0.0/8; IPv4-mapped addresses count as IPv4.
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
