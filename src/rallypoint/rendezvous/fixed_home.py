"""A store that does not depend on any node of the job: etcd, a shared folder, a third party's server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rallypoint._core import addresses
from rallypoint._core.clock import Deadline
from rallypoint.errors import RendezvousConnectionError

from .backend import Meeting
from .end_mark import EndMark
from .home import Home, LastRound, Recovery
from .store import Store


S = TypeVar("S", bound=Store)


def fixed_home(
    meeting: Meeting,
    open_store: Callable[[], S],
    *,
    clear: Callable[[S], None],
    open_ended: Callable[[], S] | None = None,
    age: Callable[[S, str], float] | None = None,
) -> Home:
    """The home of a job's store that outlives the job's nodes, for :class:`.Backend`.

    Does not block: nothing is connected to yet.
    Args:
        meeting: the job.
        open_store: connects to the keys of this job, which no other job uses. It may be called from several threads.
        clear: removes all of these keys when the last node of the job leaves.
        open_ended: connects to other keys, which outlive the job by a minute, so that late nodes learn from them that
            the job has ended. None: late nodes wait for a new job of the same name instead.
        age: seconds since a key was set there; None if keys expire on their own after a minute.
    Returns:
        What ``Backend.home`` must return.
    """
    mark = None
    if meeting.mark_end and open_ended is not None:
        mark = EndMark(open_ended, clear, addresses.hostname(), age)
    hosts = meeting.endpoint.hosts
    towards = (hosts[0].host, hosts[0].port) if hosts else None
    return FixedHome(open_store, towards=towards, clear=clear, mark=mark)


class FixedHome:
    """A store that does not depend on any node of the job.

    Args:
        open_store: makes a connection.
        towards: a host and port that all nodes can reach, or None.
        clear: removes everything the job has left, over a connection.
        mark: the mark that the job leaves for late nodes, or None.
    """

    serves = False
    host: str | None = None

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        towards: tuple[str, int] | None = None,
        clear: Callable[[Any], None] | None = None,
        mark: EndMark | None = None,
    ) -> None:
        self._open = open_store
        self._mark = mark
        self._clear = clear
        self._towards = towards

    def connect(self, deadline: Deadline, stop: threading.Event) -> Store:
        if self._mark is not None:
            self._mark.come()
        return self._open()

    def recover(
        self,
        error: RendezvousConnectionError,
        last: LastRound | None,
        deadline: Deadline,
        stop: threading.Event,
    ) -> Recovery:
        pause = 0.05
        while True:
            try:
                store = self._open()
                store.set("probe", b"1")  # a read is not enough: it works on a full disk, too
                return Recovery(store, moved=False)
            except RendezvousConnectionError as again:
                error = again
            if stop.wait(pause) or deadline.expired():
                raise error
            pause = min(2 * pause, 1.0)

    def visit(self, addr: str, port: int) -> Store | None:
        return None

    def follow(self, addr: str, port: int, plan: Mapping[str, Any] | None) -> None:
        pass

    def redirect(self, store: Store) -> None:
        pass

    def standby(self, addr: str) -> Mapping[str, Any]:
        return {}

    def towards(self) -> tuple[str, int] | None:
        return self._towards

    def clear(self, store: Store, *, well: bool) -> None:
        # The mark comes first: a node that arrives in between must learn from one place or the other that the job has ended.
        if self._mark is not None:
            self._mark.leave(well=well)
        if self._clear is not None:
            self._clear(store)

    def close(self) -> None:
        if self._mark is not None:
            self._mark.close()
