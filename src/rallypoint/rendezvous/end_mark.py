"""The mark that a successful job leaves for a minute in a store that outlives it, for late nodes.

A name may be used again: the same command in a loop is a new job each time. So each host is told only once: a host
that took part in the job, or was told already, starts a new job. After :data:`ENDED_FOR` seconds the mark is void,
by the store's clock.

[Note: Numbers] Jobs of the same name are numbered. The mark holds N, the number of the last one that succeeded, and each
number has its own list of hosts. A node that comes for the next job puts its host on list N+1; from then on the mark no
longer turns nodes away. Nodes may come at the same time, so none of them removes anything of N or N+1: the first on list
N+1 removes list N-1. A job that fails leaves nothing, and the numbers start again.
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
# The most hosts looked at; a job with more does not tell its late nodes.
_MOST_HOSTS = 4096


class EndMark:
    """The mark of one job, as one node sees it.

    Args:
        open_store: connects to the mark's keys, which are apart from the job's own.
        remove: deletes all of these keys, over such a connection.
        age: seconds since one of these keys was set; None if keys expire on their own.
        host: this node's host name.
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
        self._number = 0  # this node's job; 0: the node has not come yet
        self._told = False

    def come(self) -> None:
        """Check the mark before this node takes part. Does nothing if the store cannot be reached.

        Raises:
            RendezvousClosedError: the job has succeeded, and this host has not been told yet. Raised again if this
                node calls again, because it must not start the next job of the name.
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
                if self._last(store) == last:  # otherwise its list may have been removed meanwhile
                    break
            if late:
                self._add(store, last)
                self._told = True
                raise RendezvousClosedError(ENDED_WELL)
            self._number = last + 1
            if self._add(store, self._number) == 1:
                self._forget(store, last - 1)

    def leave(self, *, well: bool) -> None:
        """Set the mark, or remove it: the job is over, and this was its last node."""
        store = self._store
        if store is None or self._number == 0:
            return
        with contextlib.suppress(RendezvousConnectionError):  # the next job of the name has started
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
        """The number of the last job that succeeded; 0 if there is none."""
        return _number(store.get_many([_ENDED])[0])

    def _is_late(self, store: Store, last: int) -> bool:
        """Whether this node comes for a job that has ended: it did not take part, and the next has not started."""
        if self._age is not None and self._age(store, _ENDED) > ENDED_FOR:
            return False
        ended, following = (
            _number(each) for each in store.get_many([_count(last), _count(last + 1)])
        )
        if following > 0 or ended > _MOST_HOSTS:
            return False
        return self._host not in self._hosts(store, last)

    def _add(self, store: Store, number: int) -> int:
        """Put this host on a job's list. Returns its place there, counted from 1."""
        place = store.add(_count(number), 1)
        store.set(_place(number, place), self._host.encode())
        return place

    def _hosts(self, store: Store, number: int) -> set[str]:
        count = _number(store.get_many([_count(number)])[0])
        keys = [_place(number, place) for place in range(1, min(count, _MOST_HOSTS) + 1)]
        return {each.decode(errors="replace") for each in store.get_many(keys) if each is not None}

    def _forget(self, store: Store, number: int) -> None:
        """Remove the list of a job that the mark no longer refers to."""
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
