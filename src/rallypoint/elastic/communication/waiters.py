"""Threads that make calls which cannot be interrupted, while the caller waits for the result in slices.

A thread is started if none is free, and kept for a while: handing a call over is cheaper than starting a thread. A thread whose
call never ends is never free again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from rallypoint._core import forks


# Seconds without a call after which a thread exits.
IDLE = 1.0

T = TypeVar("T")


class Call(Generic[T]):
    """A call in another thread.

    Args:
        function: the function to call.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._ended = threading.Event()
        try:
            waiter = _free.pop()
        except IndexError:
            waiter = _Waiter()
        waiter.calls.put(lambda: self._run(waiter))

    def ends_within(self, seconds: float) -> bool:
        """Whether the call has ended. Blocks: until it has, or the time is over."""
        return self._ended.wait(seconds)

    def result(self) -> T:
        """The result of a call that has ended.

        Raises:
            BaseException: whatever the function raised.
        """
        if self._errors:
            raise self._errors.pop()
        return self._results.pop()

    def _run(self, waiter: _Waiter) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            self._results.append(function())
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            self._errors.append(error)
        finally:
            # Before anybody learns of the end, so that the next call finds this thread free.
            _free.append(waiter)
            self._ended.set()


class _Waiter:
    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="rally-elastic-waiter", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                call = self.calls.get(timeout=IDLE)
            except queue.Empty:
                try:
                    _free.remove(self)
                except ValueError:
                    continue  # somebody has just taken it
                return
            call()
            del call  # it holds the caller's objects


_free: list[_Waiter] = []


def _forget() -> None:
    """In a forked child: the threads are the parent's."""
    _free.clear()


forks.call_in_child(_forget)
