"""Serving peers: choosing the thread for each request, and counting requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rallypoint.rpc.autograd.contexts import Contexts
from rallypoint.rpc.connections.incoming import Incoming
from rallypoint.rpc.references.rref_table import RRefTable
from rallypoint.rpc.serialization.allowlist import AllowList
from rallypoint.rpc.stream import WINDOW, WINDOW_NAME
from rallypoint.rpc.threads.task_queue import Task
from rallypoint.rpc.threads.thread_pool import TICK, Job, ThreadPool
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.wire.frames import Frame

from .coroutine_loop import CoroutineLoop
from .counters import Counters, Tally
from .devices import PeerPickler
from .item_source import ItemSource
from .serving import Request


# After this many short runs, a formerly long function runs on the leader again.
_SHORT_AGAIN = 8


class Service:
    """Gives each request a thread: one of the pool's, the event loop's, or a stream's own.

    Args:
        me: this worker.
        pool: its threads.
        pickler: pickles the answers.
        allowed: the names that requests may contain; None: any.
        counters: count all calls.
        done: counts calls by the program.
    """

    # Set by enter(), before anything is served.
    rrefs: RRefTable
    contexts: Contexts

    def __init__(
        self,
        me: WorkerInfo,
        pool: ThreadPool,
        pickler: PeerPickler,
        allowed: AllowList | None,
        counters: Counters,
        done: Tally,
    ) -> None:
        self.me = me
        self.allowed = allowed
        self._pool = pool
        self._counters = counters
        self._count_done = done.add
        self.loop = CoroutineLoop(f"rpc-{me.name}")
        self.long_ones: dict[Any, int] = {}
        # Bound to the parts directly: wrapper methods would cost time in each request.
        self.dumps = pickler.dumps
        self.submit = pool.submit
        self.leads = pool.leads
        self.run_coroutine = self.loop.run

    def enter(self, me: WorkerInfo, rrefs: RRefTable, contexts: Contexts) -> None:
        self.me = me
        self.contexts = contexts
        self.rrefs = rrefs

    def new_job(self, incoming: Incoming, frame: Frame) -> Job:
        return Request(self, incoming, frame)

    # -- threads ------------------------------------------------------------------------------------

    def is_long(self, target: Any) -> bool:
        """Whether recent runs of a function took long."""
        if not self.long_ones:
            return False
        try:
            return self.long_ones.get(target, 0) > 0
        except TypeError:
            return False

    def note_length(self, target: Any, seconds: float) -> None:
        try:
            if seconds > TICK:
                if len(self.long_ones) < 4096:
                    self.long_ones[target] = _SHORT_AGAIN
            elif target in self.long_ones:
                self.long_ones[target] -= 1
                if self.long_ones[target] <= 0:
                    del self.long_ones[target]
        except (TypeError, KeyError):
            return

    def hand_over(self, job: Job) -> bool:
        """Give a job to a follower if the calling thread leads; False if it does not."""
        if not self._pool.leads():
            return False
        self._pool.submit(job)
        return True

    def stream(
        self,
        request: Request,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> None:
        """Run a generator on a thread of its own, since it waits for its consumer; an async one on the event loop."""
        kwargs = dict(kwargs or {})
        source = ItemSource(request, int(kwargs.pop(WINDOW_NAME, WINDOW)), self.loop)
        self._pool.submit(Task(lambda: source.run(func, args, kwargs)))

    # -- counting -----------------------------------------------------------------------------------

    def served(self, arrived: float, *, failed: bool, is_user: bool = True) -> None:
        counters = self._counters
        counters.served += 1
        if is_user:
            self._count_done()
        if failed:
            counters.failed += 1
        counters.note(time.monotonic() - arrived)
