"""Signals as events: handlers that only note the number, a descriptor that becomes readable, restored after."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self


class SignalEvents:
    """While entered, the given signals are collected instead of acted on.

    Outside of the main thread Python cannot handle signals; then nothing is collected and the
    descriptor never becomes readable. A signal that was ignored when we came stays ignored (``nohup``).

    Args:
        numbers: the signals to collect.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = tuple(numbers)
        self._received: list[int] = []
        self._before: dict[int, Any] = {}  # Any: what signal.getsignal returns
        self._wakeup_before = -1
        self._active = False
        self._read, self._write = -1, -1

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if threading.current_thread() is threading.main_thread():
            self._active = True
            self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            for number in self._numbers:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._active:
            for number, before in self._before.items():
                # None: the handler was not installed from Python and cannot be put back.
                signal.signal(number, signal.SIG_DFL if before is None else before)
            signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        return self._read

    def take(self) -> list[int]:
        """The signals that came since the last call, in order."""
        try:
            while os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass
        received, self._received = self._received, []
        return received

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)
