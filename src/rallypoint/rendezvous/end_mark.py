"""The mark that a job which succeeded leaves for a minute in a store that outlives it, for late nodes.

A name may be used again: the same command in a loop is a new job each time. So each host is told once: one
that took part in the job, or was told already, starts a new one. After :data:`ENDED_FOR` seconds the mark is void,
by the store's clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rallypoint.errors import RendezvousClosedError, RendezvousConnectionError

from .home import ENDED_WELL
from .store import Store


ENDED_FOR = 60
_ENDED, _COUNT, _HOST = "ended", "hosts", "host/"
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
            if store.exists(_ENDED):
                void = self._age is not None and self._age(store, _ENDED) > ENDED_FOR
                told = not void and self._host not in self._hosts(store)
                if told:
                    self._add(store)
                    self._told = True
                    raise RendezvousClosedError(ENDED_WELL)
                self._remove(store)
                store.close()
                self._store = store = self._open()
            self._add(store)

    def leave(self, *, well: bool) -> None:
        """The job is over, and this was its last node."""
        if self._store is None:
            return
        with contextlib.suppress(RendezvousConnectionError):  # the next job of the name has begun
            if well:
                self._store.set(_ENDED, b"well")
            else:
                self._remove(self._store)

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _add(self, store: Store) -> None:
        store.set(f"{_HOST}{store.add(_COUNT, 1)}", self._host.encode())

    def _hosts(self, store: Store) -> set[str]:
        (counted,) = store.get_many([_COUNT])
        count = int(counted) if counted is not None and counted.isdigit() else 0
        keys = [f"{_HOST}{index}" for index in range(1, min(count, _MOST_HOSTS) + 1)]
        return {each.decode(errors="replace") for each in store.get_many(keys) if each is not None}
