"""Adapts a third party's handler to what a launcher needs.

The handler determines the members of a round, their ranks and the store. Everything else (one plan for all, heartbeats,
watching a neighbour) comes from our own protocol, which then runs in that store with those nodes and ranks. So a plug-in
implements only torchelastic's interface.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import (
    RallyError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
)

from .api import RendezvousHandler, RendezvousInfo
from .backends.native_store import load
from .dynamic import DynamicRendezvous
from .fixed_home import FixedHome
from .home import LastRound, Recovery
from .store import Store


# How often rank 0 asks the plug-in whether nodes wait (seconds).
ASK_EVERY = 1.0
# How long the plug-in may take to answer when the round is over (seconds).
ANSWER_PATIENCE = 5.0


class _RoundsHome(FixedHome):
    """The store of the plug-in's last round."""

    def __init__(self) -> None:
        self.store: Store | None = None
        super().__init__(self._clone)

    def _clone(self) -> Store:
        assert self.store is not None
        return self.store.clone()

    def recover(
        self,
        error: RendezvousConnectionError,
        last: LastRound | None,
        deadline: Deadline,
        stop: threading.Event,
    ) -> Recovery:
        raise error  # the next round may have another store


class PluggedRendezvous(DynamicRendezvous):
    """Rounds of a plug-in's handler.

    Args:
        make: makes the plug-in's handler; called by the first :meth:`next_rendezvous`.
        more: the arguments of :class:`~rallypoint.rendezvous.dynamic.DynamicRendezvous`, except the home.
    """

    def __init__(self, make: Callable[[], RendezvousHandler], **more: Any) -> None:
        self._rounds_home = _RoundsHome()
        super().__init__(self._rounds_home, split_brain_guard=False, **more)
        self._make = make
        self._handler: RendezvousHandler | None = None
        self._most = self._settings.max_nodes
        self._last_store: object = None
        self._asking: threading.Thread | None = None
        self._round_over = threading.Event()

    def next_rendezvous(self) -> RendezvousInfo:
        self._end_asking()
        if self._handler is None:
            load()  # the store will be c10d's, which prints warnings unless told not to beforehand
            self._handler = self._ask(self._make)
        info = self._ask(self._handler.next_rendezvous)
        store, rank, count = info
        self._settings = replace(self._settings, min_nodes=count, max_nodes=count)
        self._standing.node = replace(self._standing.node, given_rank=rank)
        if store is not self._last_store:
            self._last_store = store
            self._rounds_home.store = _as_ours(store)
            self._go_to_new_store()
        formed = super().next_rendezvous()
        if formed.rank == 0 and formed.world_size < self._most:
            self._round_over.clear()
            self._asking = threading.Thread(
                target=self._ask_for_waiting, name="rally-plugged", daemon=True
            )
            self._asking.start()
        return formed

    def find_store(self) -> None:
        self._connection.close(leaving=False)  # the plug-in's next round brings a store

    def abandon_store(self) -> None:
        pass  # no node of the job is known to serve it

    def close_rendezvous(self, reason: str) -> None:
        if self._handler is not None:
            self._ask(self._handler.set_closed)
        if self.records is not None:
            super().close_rendezvous(reason)

    def shutdown(self, *, finished: bool = True) -> bool:
        self._end_asking()
        super().shutdown(finished=finished)
        self._last_store = None
        if (store := self._rounds_home.store) is not None:
            store.close()
        return self._handler is None or bool(self._ask(self._handler.shutdown))

    def _go_to_new_store(self) -> None:
        """Treat a new store as if the job's store had moved: put the last plan there, for nodes that were in no round yet."""
        if self._standing.node.generation is None:
            self._connection.close(leaving=False)
            return
        home, deadline = self._rounds_home, Deadline(self._timing.join)
        moved = Recovery(home.connect(deadline, self._stop), moved=True)
        self._connection.close(leaving=False)
        self._connection.adopt(moved)
        self._connection.moved = False

    def _ask_for_waiting(self) -> None:
        known = 0
        while not self._round_over.wait(ASK_EVERY):
            try:
                assert self._handler is not None
                waiting = int(self._handler.num_nodes_waiting())
            except Exception:  # noqa: BLE001  # a plug-in may raise anything
                return  # the plug-in reports the cause when asked for a round
            if waiting > known:
                self._listener.on_waiting(waiting)
            known = waiting

    def _end_asking(self) -> None:
        self._round_over.set()
        thread, self._asking = self._asking, None
        if thread is not None:
            thread.join(ANSWER_PATIENCE)

    def _ask(self, question: Any) -> Any:
        """Ask the plug-in. What it raises is raised again with the backend's name, torch's errors as ours."""
        try:
            return question()
        except RallyError:
            raise
        except Exception as error:
            kind = type(error).__name__
            text = f"rendezvous backend {self.get_backend()!r}: {kind}: {error}"
            if kind == "RendezvousClosedError":
                raise RendezvousClosedError(text) from error
            if kind == "RendezvousGracefulExitError":
                raise RendezvousGracefulExitError(text) from error
            if kind == "RendezvousConnectionError":
                raise RendezvousConnectionError(text) from error
            raise RendezvousError(text) from error


def _as_ours(store: Any) -> Store:
    if hasattr(store, "put_new"):
        ours: Store = store
        return ours
    from .backends.c10d_client import C10dClient

    return C10dClient(store)
