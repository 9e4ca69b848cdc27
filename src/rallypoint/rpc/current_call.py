"""The call that the running code serves: who has made it, and how long they wait."""

from __future__ import annotations

import time
from contextvars import ContextVar

from .worker_info import WorkerInfo


class CurrentCall:
    """A call that is being served; :func:`current_call` gives it.

    Attributes:
        caller: who has made it.
        cancelled: whether the caller has given it up. A function that takes long may look at it and return.
    """

    __slots__ = ("caller", "cancelled", "deadline")

    def __init__(self, caller: WorkerInfo, deadline: float | None) -> None:
        self.caller = caller
        self.deadline = deadline
        self.cancelled = False

    def time_left(self) -> float | None:
        """Seconds until the caller waits no more, never negative; None without a limit."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


SERVING: ContextVar[CurrentCall | None] = ContextVar("rallypoint_rpc_call", default=None)


def current_call() -> CurrentCall | None:
    """The call that the running code serves, in coroutines too; None outside of calls."""
    return SERVING.get()
