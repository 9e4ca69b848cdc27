"""What a supervisor waits for: descriptors, and times at which something is due."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Protocol

from rallypoint._core import clock


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class EventLoop:
    """Descriptors and timers of one thread. The caller decides in which order it looks at what is ready."""

    def __init__(self) -> None:
        self._poller = select.poll()
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def watch(self, file: int | HasFileno, wanted: int = select.POLLIN) -> None:
        """Wait for a descriptor from now on. A second call changes the events to wait for."""
        self._poller.register(file, wanted)

    def forget(self, file: int | HasFileno) -> None:
        """Stop waiting for a descriptor. Does nothing if it is closed or not watched."""
        try:
            self._poller.unregister(file)
        except (KeyError, ValueError):
            pass

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` in :meth:`call_due` once this time has passed."""
        self._timers.append((clock.MONOTONIC.now() + seconds, call))

    def wait(self, until: float | None = None) -> set[int]:
        """Block until a descriptor is ready, a timer is due, or it is ``until`` (seconds, monotonic).

        Returns:
            The descriptors that are ready.
        """
        times = [at for at, _ in self._timers]
        if until is not None:
            times.append(until)
        timeout = clock.milliseconds_until(min(times)) if times else None
        return {fd for fd, _ in self._poller.poll(timeout)}

    def call_due(self) -> None:
        """Call what is due now."""
        now = clock.MONOTONIC.now()
        due = [call for at, call in self._timers if at <= now]
        self._timers = [each for each in self._timers if each[0] > now]
        for call in due:
            call()
