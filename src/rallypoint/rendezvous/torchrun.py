"""Stock torchrun with our rendezvous: ``torchrun --rdzv-backend rallypoint --rdzv-endpoint …``.

torchrun asks every installed entry point of the group ``torchrun.handlers`` for a creator, and the creator of the
requested backend for a handler. :class:`Rounds` is that handler without torch's types; the class around it
subclasses torch's, so it is created on first use.

[Note: A store for each generation]
torchrun's workers are clients of a store that their agents serve (``use_agent_store``). Here each agent binds a
free port before a round and tells it to the others; the agent that becomes rank 0 serves a new store there.
So nothing that workers of an earlier generation wrote can be read, and all learn the address of the new rank 0
from the round's plan. The previous store stops when the next round is formed, not sooner: workers
that are being stopped on other nodes still use it.

[Note: How an agent leaves]
torchrun calls ``shutdown()`` whenever it exits, except by a signal, and does not say why; the exception being handled
does. If all workers succeeded, the node has finished, and other nodes continue undisturbed. If workers failed and no
restart is left, the job has failed: the rendezvous is closed, and the other nodes stop too. Anything else
(such as arriving too late) concerns only this node: the others treat it as lost.

[Note: Stopping together]
An agent that sees waiting nodes stops its workers; with Gloo, the workers of the other nodes then fail at once. An agent
that notices failed workers before it sees the waiting nodes uses one of its restarts, or ends the job if none is left.
So the first agents wait briefly until the others have seen the waiting nodes too.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any

from rallypoint._core import addresses
from rallypoint._core.clock import MONOTONIC, Deadline
from rallypoint.errors import (
    RallyError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeout,
)

from . import plan as plans
from .api import RendezvousInfo
from .dynamic import Listener
from .lease import Leases


_log = logging.getLogger(__name__)

# torchrun asks ten times a second whether nodes wait; the store is asked this often (seconds). A lost
# node is reported without asking.
LOOK_EVERY = 1.0
# How long agents wait for each other before they stop their workers (seconds): a few looks, and a little more.
TOGETHER = 2.5 * LOOK_EVERY
# A node without a beat for this many leases is gone, and not waited for at the end.
LEASES_TO_FINISH = 3.0
# How long a node that serves a store stays after it has failed, so that others learn that the job has failed (seconds).
STAY_AFTER_FAILURE = 60.0


class Ending(Enum):
    """How an agent ended."""

    FINISHED = "all its workers succeeded"
    FAILED = "its workers failed, and no restart is left"
    CLOSED = "it was told that the rendezvous is closed"
    OTHER = "anything else"


def handlers() -> Callable[[Any], Any]:
    """The entry point: torchrun calls it without arguments, and calls its result with the parameters."""
    return create_handler


def create_handler(params: Any) -> Any:
    """torch's kind of handler; the endpoint's URL decides between tcp, etcd and file.

    Args:
        params: torch's ``RendezvousParameters``.

    Raises:
        ConfigError: an option or the endpoint cannot work; the error says which.
        torch's RendezvousError: the endpoint cannot be served.
    """
    return _handler_class()(params)


class Rounds:
    """The requests of torchrun's agent, in our types. Not thread-safe; nor is the agent.

    Args:
        params: torch's ``RendezvousParameters``.
    """

    def __init__(self, params: Any) -> None:
        from .create import handler_for  # imports everything that a rendezvous needs

        self._news = threading.Event()
        self.handler = handler_for(
            params,
            name=params.backend,
            # torchrun shows only warnings, and the user should see which nodes it waits for.
            say=lambda text: _log.warning("%s", text),
            listener=Listener(
                on_loss=lambda _: self._news.set(), on_store_lost=lambda _: self._news.set()
            ),
        )
        self._size = 0
        self._server: Any = None
        self._rank = -1
        self._next_look = 0.0

    def next_round(self) -> tuple[RendezvousInfo, str, int]:
        """The next round, and the address of its workers' store. Errors are those of our handler."""
        from .backends.native_store import StoreServer

        listener = addresses.bind_store(self.handler.listens_on, 0)
        try:
            port = int(listener.getsockname()[1])
            self.handler.bring({"workers_store": port})
            round_ = self.handler.next_rendezvous()
            addr, first_port = self._workers_store()
        except BaseException:
            listener.close()
            raise
        previous, self._server = self._server, None
        self._rank, self._size = round_.rank, round_.world_size
        if round_.rank == 0:
            self._server = StoreServer(listener)
        else:
            listener.close()
        if previous is not None:
            previous.close()
        self._news.clear()
        return round_, addr, first_port

    def _workers_store(self) -> tuple[str, int]:
        """The address that rank 0 announced: see [Note: A store for each generation]."""
        first = self.handler.plan.get("first")
        facts = first.get("facts") if isinstance(first, dict) else None
        match facts:
            case {"watch": [str() as addr, *_], "workers_store": int() as port}:
                return addr, port
            case _:
                raise RendezvousStateError(
                    "rank 0 of the round serves no store for the workers: it was not started by"
                    " torchrun with this backend"
                )

    def num_nodes_waiting(self) -> int:
        """Above 0 if the agent must join the next round, for whatever reason."""
        now = MONOTONIC.now()
        lost = self._news.is_set()
        if now < self._next_look and not lost:
            return 0
        self._news.clear()
        self._next_look = now + LOOK_EVERY
        waiting = self.handler.num_nodes_waiting()
        try:
            if self.handler.is_closed():
                return 1  # the agent learns the reason when it joins the next round
            if waiting and not lost:
                self._stop_together()
        except RendezvousConnectionError:
            return 1
        return waiting

    def _stop_together(self) -> None:
        """See [Note: Stopping together]."""
        records, generation = self.handler.records, self.handler.plan.get("generation")
        if records is None or not isinstance(generation, int):
            return
        (call,) = records.look([f"{generation + 1}/call"])
        if call is not None:
            return  # a node has already opened the next round
        if records.increment(f"{generation}/stopping") >= self._size:
            records.write(f"{generation}/stop", {})
        records.wait(f"{generation}/stop", TOGETHER)

    def leave(self, ending: Ending) -> None:
        """See [Note: How an agent leaves]."""
        finished = ending is Ending.FINISHED or ending is Ending.CLOSED
        if ending is Ending.FAILED and self._rank >= 0:
            finished = self._close()  # if the others hear of that, this node need not count as lost
        self.handler.leave(finished=finished)
        serves = self.handler.serves or self._server is not None
        if finished and serves and self._rank >= 0:
            try:
                self._stay(None if ending is Ending.FINISHED else STAY_AFTER_FAILURE)
            except RallyError as error:
                _log.info("stopped waiting for the others: %s", error)
        self.handler.shutdown()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _close(self) -> bool:
        """End the job on all nodes; False if they cannot be told."""
        try:
            self.handler.close_rendezvous(
                f"the workers of node {self._rank} ({addresses.hostname()}) failed for good"
            )
        except RallyError as error:
            _log.info("the others cannot be told: %s", error)
            return False
        return True

    def _stay(self, seconds: float | None) -> None:
        """Serve until the other nodes have left, too, or are gone."""
        records, plan = self.handler.records, self.handler.plan
        if records is None:
            return
        generation = plan.get("generation")
        if not isinstance(generation, int):
            return
        (record,) = records.look([plans.ids_key(generation, plan)])
        here = [each for rank, each in enumerate(plans.ids_in(record)) if rank != self._rank]
        leases: Leases[str] = Leases(LEASES_TO_FINISH * self.handler.lease)
        deadline, pause, said = Deadline(seconds), 0.02, Deadline(self.handler.lease)
        told = False
        while here and not deadline.expired():
            bodies = dict(zip(here, records.look([f"beat/{each}" for each in here]), strict=True))
            here = [each for each, body in bodies.items() if not (body or {}).get("left")]
            beats = {each: (bodies[each] or {}).get("beat") for each in here}
            numbers = {each: beat if isinstance(beat, int) else -1 for each, beat in beats.items()}
            gone = leases.observe(MONOTONIC.now(), numbers)
            here = [each for each in here if each not in gone]
            if here and said.expired() and not told:
                told = True
                _log.warning(
                    "this node serves the job's store: it stays until the other %d nodes have ended,"
                    " too",
                    len(here),
                )
            threading.Event().wait(pause)
            pause = min(2 * pause, 0.5)


@cache
def _handler_class() -> Callable[[Any], Any]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import api

    # torch's error for each of ours; the first match counts.
    errors = (
        (RendezvousTimeout, api.RendezvousTimeoutError),
        (RendezvousConnectionError, api.RendezvousConnectionError),
        (RendezvousClosedError, api.RendezvousClosedError),
        (RendezvousStateError, api.RendezvousStateError),
        (RendezvousGracefulExitError, api.RendezvousGracefulExitError),
        (RendezvousError, api.RendezvousError),
    )

    @contextmanager
    def as_torch() -> Iterator[None]:
        """Raise rendezvous errors as torch's types, which torchrun knows."""
        try:
            yield
        except RendezvousError as error:
            theirs = next(theirs for ours, theirs in errors if isinstance(error, ours))
            raise theirs(str(error)) from error

    class TorchrunHandler(api.RendezvousHandler):
        """torch's interface over :class:`Rounds`."""

        def __init__(self, params: Any) -> None:
            with as_torch():
                self._rounds = Rounds(params)

        @property
        def use_agent_store(self) -> bool:
            """Workers are clients of the store at ``MASTER_ADDR``: rank 0's agent serves it."""
            return True

        def get_backend(self) -> str:
            return self._rounds.handler.get_backend()

        def get_run_id(self) -> str:
            return self._rounds.handler.get_run_id()

        def next_rendezvous(self) -> api.RendezvousInfo:
            with as_torch():
                round_, addr, port = self._rounds.next_round()
            return api.RendezvousInfo(
                round_.store,
                round_.rank,
                round_.world_size,
                api.RendezvousStoreInfo(master_addr=addr, master_port=port),
            )

        def is_closed(self) -> bool:
            with as_torch():
                return self._rounds.handler.is_closed()

        def set_closed(self) -> None:
            with as_torch():
                self._rounds.handler.set_closed()

        def num_nodes_waiting(self) -> int:
            with as_torch():
                return self._rounds.num_nodes_waiting()

        def shutdown(self) -> bool:
            match sys.exc_info()[1]:
                case None:
                    ending = Ending.FINISHED
                case ChildFailedError():
                    ending = Ending.FAILED
                case api.RendezvousClosedError():
                    ending = Ending.CLOSED
                case _:
                    ending = Ending.OTHER
            self._rounds.leave(ending)
            return True

    return TorchrunHandler
