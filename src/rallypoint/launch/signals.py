"""Signals as events for the supervisor, and protection of the other processes of a job.

Batch systems signal every process of a job. A signal that is meant for the workers must not kill the processes around
them: the fork server records it, the store ignores it, and workers start with default handlers.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Self


# These do not kill a process by default, are not sent by other processes, or are ignored by Python.
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
# A shell without job control ignores these for processes in the background; the user did not ask for that.
IGNORED_BY_SHELLS = frozenset({signal.SIGINT, signal.SIGQUIT})


def ending() -> frozenset[int]:
    """The signals that other processes may send and that kill a process without a handler."""
    return frozenset(signal.valid_signals()) - _NOT_OURS


def block() -> Iterable[int]:
    """Block :func:`ending` signals in this thread and its children. Returns the previous mask."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, ending())


def restore(mask: Iterable[int]) -> None:
    """Undo :func:`block`."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def forget_blocked() -> None:
    """Drop :func:`ending` signals that arrived while they were blocked."""
    while signal.sigtimedwait(ending(), 0) is not None:
        pass


def note(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call ``handler`` for each :func:`ending` signal; ignored ones stay ignored (``nohup``). Unblocks all.

    Unlike an ignored signal, a handler is not inherited by an executed program.
    """
    for number in ending():
        if number in IGNORED_BY_SHELLS or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    restore(())


def ignore() -> None:
    """Ignore all :func:`ending` signals, also in programs that this process executes."""
    for number in ending():
        signal.signal(number, signal.SIG_IGN)
    restore(())


class SignalEvents:
    """A context in which the given signals are collected, even if they were blocked before.

    Python handles signals only in the main thread: in other threads nothing is collected, and the descriptor never
    becomes readable. Signals that were ignored before stay ignored (``nohup``).

    Args:
        numbers: the signals to collect.
        even_ignored: the signals among them that are collected even if they were ignored before.
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

    def repeat(self) -> None:
        """After the block: raise again the signals that arrived too late to be taken, so that they have their usual effect."""
        received, self._received = self._received, []
        for number in received:
            signal.raise_signal(number)

    def fileno(self) -> int:
        return self._read

    def take(self) -> list[int]:
        """The signals received since the last call, in order, with SIGHUP last.

        Of two that are pending, the lower number is delivered first, but systemd sends SIGHUP right behind SIGTERM.
        """
        try:
            while os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass
        received, self._received = self._received, []
        return sorted(received, key=lambda number: number == signal.SIGHUP)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)
