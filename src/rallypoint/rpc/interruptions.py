"""Signal handlers run between the steps of a call, never within one, so that a handler may make calls itself.

Python runs a handler on the main thread wherever that thread is, even where it holds one of our locks or the role of a
connection's reader. A call in the handler would then deadlock with the frames below it. C code does not have this
problem, since Python waits until it returns. Wrapping handlers gives our code the same protection:

- Outside our code, the handler runs at once.
- Where the main thread sleeps until an answer arrives (:class:`Rest`), it first releases what others need. After the
  handler has run, the sleep ends with :class:`Lent` and is repeated.
- Anywhere else, the handler becomes due. It runs before the next such sleep (:meth:`Rest.check`), when the call returns,
  or when the signal, which is sent again every millisecond, arrives in one of the two cases above. If the signal keeps
  finding the main thread in the same place, the thread is in some other kind of wait, and the handler runs.

Handlers are wrapped while this process is a worker, by replacing ``signal.signal`` and ``signal.getsignal``, which still
show the original handlers. Python's own handler for Ctrl-C is not wrapped.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from .torch_private import start_thread


_PACKAGE = Path(__file__).parent
_OURS = (f"{_PACKAGE}{os.sep}", f"{_PACKAGE.parent / 'wire'}{os.sep}")
_main = threading.main_thread().ident
# Seconds until a signal is sent again, and how often it must find the main thread in the same place.
_AGAIN = 0.001
_STANDS = 20

_signal = signal.signal
_getsignal = signal.getsignal
_is_on = False


class Lent(Exception):
    """A handler has run during a sleep, and what was held was released."""


class Rest:
    """A sleep of the main thread.

    Args:
        lend: releases what others need, before a handler runs.
    """

    __slots__ = ("_came", "_lend", "is_lent")

    def __init__(self, lend: Callable[[], None]) -> None:
        self._lend = lend
        self._came: list[Any] = []
        self.is_lent = False

    @staticmethod
    def of_main(lend: Callable[[], None]) -> Rest | None:
        """A rest on the main thread; None on other threads, which run no handlers."""
        return Rest(lend) if threading.get_ident() == _main else None

    def call(self, sleep: Callable[[Any], Any], argument: Any) -> Any:
        """``sleep(argument)``, a C function that acquires nothing before it returns.

        Raises:
            Lent: a handler has run, and nothing was acquired.
            Exception: the handler raised it, and nothing was acquired.
        """
        came = self._came
        try:
            _rests.append(self)
            # Atomic for a handler: extend and map are C code.
            came.extend(map(sleep, (argument,)))
        finally:
            if _rests and _rests[-1] is self:
                _rests.pop()
        return came.pop()

    def check(self) -> None:
        """Run due handlers, just before the sleep.

        Raises:
            Lent: a handler has run.
            Exception: a handler raised it.
        """
        if DUE:
            self.lend()
            run_due()
            raise Lent

    @property
    def is_open(self) -> bool:
        """Whether it can be interrupted."""
        return not (self._came or self.is_lent)

    def lend(self) -> None:
        self.is_lent = True
        self._lend()


# The main thread's rests, innermost last: a handler may be interrupted by another.
_rests: list[Rest] = []
# Due handlers by signal, with the frame that was interrupted. Checked by others before they call :func:`run_due`.
DUE: dict[int, tuple[Handler, FrameType | None]] = {}


class Handler:
    """Wraps a user's handler."""

    def __init__(self, act: Callable[[int, FrameType | None], Any]) -> None:
        self.act = act
        self._place: tuple[FrameType, int] | None = None
        self._stood = 0

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if not _is_amid(frame):
            return self._act(number, frame)
        rest = _rests[-1] if _rests else None
        if rest is not None and rest.is_open:
            rest.lend()
            self._act(number, frame)
            raise Lent
        assert frame is not None
        before, self._place = self._place, (frame, frame.f_lasti)
        is_there = before is not None and before[0] is frame and before[1] == frame.f_lasti
        self._stood = self._stood + 1 if is_there else 0
        if self._stood < _STANDS:
            DUE[number] = self, frame
            try:
                start_thread(_send_again, (number,))
            except RuntimeError:
                # No thread can be started: run it now rather than never.
                pass
            else:
                return None
        return self._act(number, frame)

    def _act(self, number: int, frame: FrameType | None) -> Any:
        self._place = None
        DUE.pop(number, None)
        return self.act(number, frame)


def _is_amid(frame: FrameType | None) -> bool:
    """Whether our code was interrupted, not a handler that runs on top of it."""
    while frame is not None:
        code = frame.f_code
        if code is Handler.__call__.__code__:
            return False
        if code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def run_due() -> None:
    """Run due handlers if this is the main thread. Call it only where nothing is held. Raises what a handler raises."""
    if threading.get_ident() == _main:
        while DUE:
            number, (handler, frame) = DUE.popitem()
            handler.act(number, frame)


def _send_again(number: int) -> None:
    never = threading.Lock()
    never.acquire()
    never.acquire(timeout=_AGAIN)
    # The handler may have run or been replaced meanwhile.
    if number in DUE and type(_getsignal(number)) is Handler and _main is not None:
        signal.pthread_kill(_main, number)


def _wrapped(handler: Any) -> Any:
    if not callable(handler) or handler is signal.default_int_handler or type(handler) is Handler:
        return handler
    return Handler(handler)


def _as_given(handler: Any) -> Any:
    return handler.act if type(handler) is Handler else handler


@functools.wraps(_signal)
def _set(signalnum: int, handler: Any) -> Any:
    return _as_given(_signal(signalnum, _wrapped(handler)))


@functools.wraps(_getsignal)
def _get(signalnum: int) -> Any:
    return _as_given(_getsignal(signalnum))


def begin() -> None:
    """Wrap all handlers until :func:`end`. Only on the main thread: others may not change handlers."""
    global _is_on, _signal, _getsignal  # noqa: PLW0603  # as Python's own table of handlers is
    if threading.get_ident() == _main and not _is_on:
        _is_on = True
        _signal, _getsignal = signal.signal, signal.getsignal
        signal.signal, signal.getsignal = _set, _get
        _change_all(_wrapped)


def end() -> None:
    """Unwrap all handlers. Does nothing on other threads: handlers then stay wrapped."""
    global _is_on  # noqa: PLW0603  # see begin
    if threading.get_ident() == _main and _is_on:
        _is_on = False
        if signal.signal is _set:
            signal.signal = _signal
        if signal.getsignal is _get:
            signal.getsignal = _getsignal
        _change_all(_as_given)


def abandon() -> None:
    """In a forked child, whose main thread is the one that forked."""
    global _main  # noqa: PLW0603  # of this process
    _main = threading.get_ident()
    _rests.clear()
    DUE.clear()
    end()


def _change_all(change: Callable[[Any], Any]) -> None:
    for number in signal.valid_signals():
        handler = _getsignal(number)
        changed = change(handler)
        if changed is not handler:
            _signal(number, changed)
