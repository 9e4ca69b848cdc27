"""Waiting until no call is under way, without a look at the clock and at next to no cost for calls that end meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rallypoint._core.clock import Deadline


class IdleCondition:
    """Whoever ends a call says so, if somebody wants to know.

    Attributes:
        is_wanted: whether anybody does. Read without a lock, after what was ended is seen to have ended: who wants
            to know says so first, and looks then.
    """

    __slots__ = ("_changed", "_closed", "_waiting", "is_wanted")

    def __init__(self) -> None:
        self.is_wanted = False
        self._changed = threading.Condition()
        self._waiting = 0
        self._closed = False

    def note(self) -> None:
        """A call has ended, or a connection with all that was under way on it."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, is_quiet: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``is_quiet()`` or :meth:`close`; False if the time was up before."""
        with self._changed:
            self._waiting += 1
            self.is_wanted = True
            try:
                return self._changed.wait_for(
                    lambda: self._closed or is_quiet(), deadline.remaining()
                )
            finally:
                self._waiting -= 1
                self.is_wanted = self._waiting > 0

    def abandon(self) -> None:
        """In a forked child."""
        self.is_wanted = False
        self._changed = threading.Condition()
        self._closed = True

    def close(self) -> None:
        """The agent closes: its calls come to an end by themselves."""
        self._closed = True
        self.note()
