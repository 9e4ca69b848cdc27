"""Collectives of NCCL, which run on the GPU: the call has returned long before they end.

After a loss they are aborted, and end with anything in their tensors. So what they bring must not reach parameters before it is
known to be right. Where all ranks have the state (:mod:`.replicated`), nobody could bring back what was lost that way: there, the CPU waits for
the GPU before the script goes on with results, which is once behind each backward pass. With snapshots it need not.
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


# Called where results are about to be used; blocks until they are right. Takes a time-out, or None for the group's.
Settle = Callable[[timedelta | None], None]


class StreamWork(WrappedWork):
    """The work of a collective over NCCL, as torch gives it to users, DDP and compiled graphs.

    Args:
        inner: NCCL's.
        settle: see above; None: nobody has to wait.

    Attributes:
        observer: called once the current stream waits for it.
    """

    def __init__(self, inner: dist.Work, settle: Settle | None) -> None:
        super().__init__(inner)
        self._settle = settle
        self.observer: Callable[[], None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait for it; where results must be right before they are used, block until it has ended.

        Raises:
            MembershipChanged: a member is lost, in a session.
            RuntimeError: it did not end in time.
        """
        # NCCL would poll for its end with a time-out, and abort by itself.
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
        self._pass: int | None = None  # the last backward pass behind which something is called

    def call_behind_backward(self, function: Callable[[], None]) -> bool:
        """In a backward pass: call a function behind it, before the script goes on. Returns False outside of one.

        Called again in the same pass, it does nothing.
        """
        number = torch_private.backward_under_way()
        if number is None:
            return False
        if number != self._pass:
            self._pass = number
            # DDP hangs its own end behind the pass when the last of its collectives has begun: go behind that, too.
            torch_private.call_behind_backward(lambda: torch_private.call_behind_backward(function))
        return True

    def wait(self, seconds: float, abort: Callable[[], None]) -> bool:
        """Wait until the current stream has done all that was given to it.

        Args:
            seconds: at most.
            abort: ends, then, everything in it that waits for other members.
        Returns:
            Whether it ended in time.
        """
        self._alarm.set(seconds, abort)
        try:
            torch.cuda.current_stream().synchronize()
        finally:
            has_rung = self._alarm.stop()
        return not has_rung
