"""The mark that a job which succeeded leaves for a minute in a store that outlives it, for late nodes.

A name may be used again: the same command in a loop is a new job each time. So each host is told once: one
that took part in the job, or was told already, starts a new one. After :data:`ENDED_FOR` seconds the mark is void,
by the store's clock.

[Note: Numbers] The jobs of a name are numbered. The mark holds N, the number of the last one that succeeded, and each
number has a list of hosts of its own. Who comes for the next job puts its host on list N+1; from then on the mark tells
nobody anything. Nodes come at the same time, so none of them removes anything of N or N+1: the first on list N+1
removes list N-1. A job that fails leaves nothing, and the numbers begin again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rallypoint.errors import RendezvousClosedError, RendezvousConnectionError

from . import fields
from .home import ENDED_WELL
from .store import Store


ENDED_FOR = 60
_ENDED = "ended"
# Hosts looked at; a job of more tells its late ones nothing.
_MOST_HOSTS = 4096


class EndMark:
    """The mark of one job, as one node sees it.

    Args:
        open_store: a connection to where the mark stands, apart from the job's own keys.
        remove: deletes all of it, over such a connection.
        age: seconds since a key of it was set; None where keys vanish by themselves.
        host: this node's.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        remove: Callable[[Any], None],
        host: str,
        age: Callable[[Any, str], float] | None = None,
    ) -> None:
        self._open = open_store
        self._remove = remove
        self._age = age
        self._host = host
        self._store: Store | None = None
        self._number = 0  # of this node's job; 0: it has not come
        self._told = False

    def come(self) -> None:
        """Called before this node takes part. Does nothing if the store cannot be reached.

        Raises:
            RendezvousClosedError: the job has succeeded, and this host has not been told yet. It is raised again if this
                node calls again: it must not start the next job of the name.
        """
        if self._told:
            raise RendezvousClosedError(ENDED_WELL)
        with contextlib.suppress(RendezvousConnectionError):
            if self._store is None:
                self._store = self._open()
            store = self._store
            while True:
                last = self._last(store)
                late = last > 0 and self._is_late(store, last)
                if self._last(store) == last:  # else its list may have been removed meanwhile
                    break
            if late:
                self._add(store, last)
                self._told = True
                raise RendezvousClosedError(ENDED_WELL)
            self._number = last + 1
            if self._add(store, self._number) == 1:
                self._forget(store, last - 1)

    def leave(self, *, well: bool) -> None:
        """The job is over, and this was its last node."""
        store = self._store
        if store is None or self._number == 0:
            return
        with contextlib.suppress(RendezvousConnectionError):  # the next job of the name has begun
            if not well:
                self._remove(store)
            # Without the list (a store may lose it), the mark would end the next job of these hosts.
            elif self._host in self._hosts(store, self._number):
                store.set(_ENDED, str(self._number).encode())

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _last(self, store: Store) -> int:
        """The number of the last job that succeeded; 0: there is none."""
        return _number(store.get_many([_ENDED])[0])

    def _is_late(self, store: Store, last: int) -> bool:
        """Whether this node comes for a job that has ended: it did not take part, and the next has not begun."""
        if self._age is not None and self._age(store, _ENDED) > ENDED_FOR:
            return False
        ended, following = (
            _number(each) for each in store.get_many([_count(last), _count(last + 1)])
        )
        if following > 0 or ended > _MOST_HOSTS:
            return False
        return self._host not in self._hosts(store, last)

    def _add(self, store: Store, number: int) -> int:
        """Put this host on a job's list. Returns which of its hosts it is."""
        place = store.add(_count(number), 1)
        store.set(_place(number, place), self._host.encode())
        return place

    def _hosts(self, store: Store, number: int) -> set[str]:
        count = _number(store.get_many([_count(number)])[0])
        keys = [_place(number, place) for place in range(1, min(count, _MOST_HOSTS) + 1)]
        return {each.decode(errors="replace") for each in store.get_many(keys) if each is not None}

    def _forget(self, store: Store, number: int) -> None:
        """Remove the list of a job that no mark stands for any more."""
        count = _number(store.get_many([_count(number)])[0]) if number > 0 else 0
        for place in range(1, min(count, _MOST_HOSTS) + 1):
            store.delete(_place(number, place))
        if count:
            store.delete(_count(number))


def _number(held: bytes | None) -> int:
    return fields.number(int(held)) if held is not None and held.isdigit() and len(held) < 20 else 0


def _count(number: int) -> str:
    return f"{number}/hosts"


def _place(number: int, place: int) -> str:
    return f"{number}/host/{place}"
