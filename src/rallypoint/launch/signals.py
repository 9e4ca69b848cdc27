"""Signals: as events for the supervisor, and kept away from processes of ours that they are not meant for.

Batch systems signal every process of a job. What is meant for the workers must not end the processes around
them: the fork server notes it, the store ignores it, and workers start with the defaults.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Self


# They end no process by default, are not sent by others, or Python ignores them already.
_NOT_OURS = frozenset(
    {
        *(signal.SIGKILL, signal.SIGSTOP),
        *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
        *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
        *(signal.SIGPIPE, signal.SIGXFSZ),
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS),
        *(signal.SIGABRT, signal.SIGTRAP),
    }
)
# A shell ignores these two for what it starts in the background: nobody asked it to.
IGNORED_BY_SHELLS = frozenset({signal.SIGINT, signal.SIGQUIT})


def ending() -> frozenset[int]:
    """The signals that others may send to a process, and that end it unless it does something about them."""
    return frozenset(signal.valid_signals()) - _NOT_OURS


def block() -> Iterable[int]:
    """Hold :func:`ending` signals back in this thread, and in what it starts; what was held back before."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, ending())


def restore(mask: Iterable[int]) -> None:
    """Undo :func:`block`."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def note(handler: Callable[[int, FrameType | None], None]) -> None:
    """Have ``handler`` called for each of them, and end of none; one that was ignored stays so (``nohup``).

    A handler, unlike ignoring, is not inherited by a program that is executed. Nothing is held back afterwards.
    """
    for number in ending():
        if number in IGNORED_BY_SHELLS or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    restore(())


def ignore() -> None:
    """Ignore all of them, in what this process executes too."""
    for number in ending():
        signal.signal(number, signal.SIG_IGN)
    restore(())


class SignalEvents:
    """While entered, the given signals are collected instead of acted on, also if they were held back (blocked).

    Outside of the main thread Python cannot handle signals; then nothing is collected and the
    descriptor never becomes readable. A signal that was ignored when we came stays ignored (``nohup``).

    Args:
        numbers: the signals to collect.
        even_ignored: those of them that are collected although they were ignored when we came.
    """

    def __init__(self, numbers: Iterable[int], even_ignored: Iterable[int] = ()) -> None:
        self._numbers = tuple(numbers)
        self._even_ignored = frozenset(even_ignored)
        self._received: list[int] = []
        self._before: dict[int, Any] = {}  # Any: what signal.getsignal returns
        self._mask_before: Iterable[int] = ()
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
                if before is not signal.SIG_IGN or number in self._even_ignored:
                    self._before[number] = before
                    signal.signal(number, self._note)
            self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._active:
            restore(self._mask_before)
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
