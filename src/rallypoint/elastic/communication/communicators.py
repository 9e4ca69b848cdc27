"""NCCL's communicators, which can be aborted from another thread: every kernel that waits for a lost member then ends.

On its own, torch would end the process a minute after a loss. Here the supervisor reports a loss, so torch's watchdog is told to
do nothing about one. This module aborts the communicator, and times out a collective that never ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from rallypoint._core import clock, env as environment, forks
from rallypoint.elastic import torch_private

from .works import Lives, attended


# Variables that torch reads when it makes a communicator.
_OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else the watchdog ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the watchdog's watchdog, which ends the process, too
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After an error the watchdog sleeps four times this long, and whoever drops the group waits for it. Milliseconds.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}


class Communicator:
    """NCCL's side of one group.

    Args:
        store: c10d's, where the members find each other.
        rank: of this process in the group.
        size: number of members.
        timeout: of its collectives.
        options: the user's, or None.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, options: Any) -> None:
        with environment.overlay(_OURS):
            self._held = [torch_private.nccl_backend(store, rank, size, timeout, options)]
        self._lock = forks.Lock()

    @property
    def backend(self) -> Any:
        return self._held[0]

    @property
    def present(self) -> Any:
        """The backend, or None after :meth:`abort`."""
        with self._lock:
            return self._held[0] if self._held else None

    def connect(self, device: torch.device, lives: Lives) -> None:
        """Connect the members now. Otherwise NCCL does so in the first collective, where nothing could interrupt it.

        Collective: all members.   Blocks: until they are connected.
        Args:
            device: this rank's.
            lives: connecting is given up when they end.
        Raises:
            RuntimeError: a member is lost.
        """
        backend = self.backend

        def meet() -> None:
            torch.cuda.set_device(device)
            backend.allreduce([torch.zeros(1, device=device)]).wait()
            torch.cuda.current_stream(device).synchronize()

        attended(meet, lives)

    def abort(self) -> None:
        """End everything that waits, from any thread. Does not block: NCCL's clean-up runs in a thread."""
        with self._lock:
            held, self._held = self._held, []
        if held:
            threading.Thread(
                target=_abort, args=(held,), name="rally-elastic-abort", daemon=True
            ).start()

    def hand_over(self) -> list[Any]:
        """Return the backend if it was not aborted, as the group is being dropped."""
        with self._lock:
            held, self._held = self._held, []
        return held


def _abort(held: list[Any]) -> None:
    held[0].abort()
    held.clear()  # in this thread: the destructor waits for the watchdog


class Alarm:
    """Calls a function if a wait for the GPU takes too long: CUDA has no wait with a time-out. One thread, one wait at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: float | None = None
        self._function: Callable[[], None] | None = None
        self._wakes: float | None = None  # None: no thread
        self._has_rung = False

    def set(self, seconds: float, function: Callable[[], None]) -> None:
        """Call the function in this many seconds, unless :meth:`stop` is called first."""
        now = clock.MONOTONIC.now()
        with self._changed:
            self._due, self._function, self._has_rung = now + seconds, function, False
            if self._wakes is None:
                self._wakes = self._due
                threading.Thread(target=self._run, name="rally-elastic-alarm", daemon=True).start()
            elif self._due < self._wakes:
                self._changed.notify_all()

    def stop(self) -> bool:
        """Stop the alarm. Returns whether it has rung."""
        with self._changed:
            self._due = self._function = None
            return self._has_rung

    def _run(self) -> None:
        # It keeps sleeping when a wait ends in time, as the next one is due later: a wake-up for each wait would cost every step.
        with self._changed:
            while True:
                now = clock.MONOTONIC.now()
                if self._due is not None and self._function is not None and self._due <= now:
                    self._has_rung = True
                    self._function()
                    self._due = self._function = None
                if self._due is None:
                    self._wakes = None
                    return
                self._wakes = self._due
                self._changed.wait(self._due - now)
