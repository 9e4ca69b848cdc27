"""Waiting until no call is in progress, without polling and at almost no cost to the calls."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rallypoint._core.clock import Deadline


class IdleCondition:
    """A condition that is notified at the end of each call while a thread waits for it.

    Attributes:
        is_wanted: whether a thread waits. Read without a lock, after the state of the ended call is visible: a waiter
            sets it first and then checks the state.
    """

    __slots__ = ("_changed", "_closed", "_waiting", "is_wanted")

    def __init__(self) -> None:
        self.is_wanted = False
        self._changed = threading.Condition()
        self._waiting = 0
        self._closed = False

    def note(self) -> None:
        """A call or a connection has ended."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, is_quiet: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``is_quiet()`` or :meth:`close`; False if the deadline comes first."""
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
        """The agent closes: waiting ends."""
        self._closed = True
        self.note()
