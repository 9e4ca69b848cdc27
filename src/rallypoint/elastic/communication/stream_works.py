"""NCCL's collectives, which run on the GPU: the call returns long before they end.

After a loss they are aborted, and leave anything in their tensors. So their results must not reach parameters before they are
known to be right. With replicated state (:mod:`.replicated`), nobody could undo such damage, so the CPU waits for the GPU before
the script uses results, which is once after each backward pass. With snapshots it need not.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.elastic import torch_private

from .communicators import Alarm
from .works import WrappedWork


# Called before results are used; blocks until they are known to be right. Takes a time-out, or None for the group's.
Settle = Callable[[timedelta | None], None]


class StreamWork(WrappedWork):
    """The work of a collective over NCCL, as torch gives it to users, DDP and compiled graphs.

    Args:
        inner: NCCL's.
        settle: see above; None: nobody has to wait.

    Attributes:
        observer: called once the current stream waits for the work.
    """

    def __init__(self, inner: dist.Work, settle: Settle | None) -> None:
        super().__init__(inner)
        self._settle = settle
        self.observer: Callable[[], None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait for it. If results must be known to be right before use, block until it has ended.

        Raises:
            MembershipChanged: a member is lost, in a session.
            RuntimeError: it did not end in time.
        """
        # With a time-out, NCCL would poll for its end, and abort on its own.
        self._inner.wait()
        settle, self._settle = self._settle, None  # DDP holds works, and this holds the session
        if settle is not None:
            settle(timeout)
        observer, self.observer = self.observer, None
        if observer is not None:
            observer()
        return True

    def get_future(self) -> Any:
        return self._inner.get_future()


class Stream:
    """Waits for the GPU, on behalf of one group."""

    _alarm = Alarm()

    def __init__(self) -> None:
        self._pass: int | None = None  # the last backward pass after which something is called

    def call_behind_backward(self, function: Callable[[], None]) -> bool:
        """In a backward pass: call a function at its end, before the script continues. Returns False outside of one.

        Further calls in the same pass do nothing.
        """
        number = torch_private.backward_under_way()
        if number is None:
            return False
        if number != self._pass:
            self._pass = number
            # DDP queues its own final callback when the last of its collectives has started: come after that, too.
            torch_private.call_behind_backward(lambda: torch_private.call_behind_backward(function))
        return True

    def wait(self, seconds: float, abort: Callable[[], None]) -> bool:
        """Wait until the current stream has done all work queued on it.

        Args:
            seconds: at most.
            abort: called when the time is over, to end everything in the stream that waits for other members.
        Returns:
            Whether it ended in time.
        """
        self._alarm.set(seconds, abort)
        try:
            torch.cuda.current_stream().synchronize()
        finally:
            has_rung = self._alarm.stop()
        return not has_rung
