"""The call that the running code serves: its caller and its deadline."""

from __future__ import annotations

import time
from contextvars import ContextVar

from .worker_info import WorkerInfo


class CurrentCall:
    """A call that is being served. :func:`current_call` returns it.

    Attributes:
        caller: the worker that made the call.
        deadline: when the caller stops waiting, in seconds of ``time.monotonic()``; None without a limit.
        cancelled: whether the caller has cancelled the call or timed out. A long function can check this and return.
        is_over: whether the call was answered or given up. Tasks that its code started may go on, without its deadline.
        size: how many bytes of tensors came with the call.
    """

    __slots__ = ("caller", "cancelled", "deadline", "is_over", "size")

    def __init__(self, caller: WorkerInfo, deadline: float | None) -> None:
        self.caller = caller
        self.deadline = deadline
        self.cancelled = False
        self.is_over = False
        self.size = 0

    def time_left(self) -> float | None:
        """How long the caller still waits.

        Returns:
            Seconds, 0 or more; None without a limit.
        """
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


SERVING: ContextVar[CurrentCall | None] = ContextVar("rallypoint_rpc_call", default=None)


def current_call() -> CurrentCall | None:
    """The call that the running code serves. Works in ``async def`` functions too.

    Returns:
        The call; None in code that no other worker has called, and in a task that outlives the call that started it.
    """
    serving = SERVING.get()
    return None if serving is None or serving.is_over else serving
