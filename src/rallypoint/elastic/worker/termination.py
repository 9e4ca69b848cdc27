"""SIGTERM in a worker whose session takes a last checkpoint.

Clusters signal all processes of a job at once. If a worker died immediately, there could be no last checkpoint. So it waits
a moment for its supervisor, which was signalled too if the whole job is to stop, and then does what the supervisor says. If
the supervisor says nothing, the signal was for this process alone.

When a machine shuts down, systemd sends SIGHUP to all processes of a login session, right behind SIGTERM. That one changes nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from multiprocessing import active_children, util
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any
from weakref import WeakSet

from rallypoint._core import linux


# Seconds that the supervisor may take to say that it was signalled, too.
MOMENT = 1.0
# Seconds within which SIGTERM is seen if it was sent before a SIGHUP: of two that are pending, the lower number is delivered first.
BEHIND = 0.25


class Word(Enum):
    """What the supervisor says."""

    TOLD = "told"  # it was told to stop: wait for its next word
    STOP = "stop"  # take a last checkpoint
    END = "end"  # the time for that is over


class Decision:
    """What becomes of a SIGTERM: pure."""

    def __init__(self) -> None:
        self._is_held = False  # a signal has arrived and is held back
        self._is_told = False  # the supervisor knows of the stop
        self._is_over = False  # signals act as they did before the session

    @property
    def is_stopping(self) -> bool:
        """Whether the job is told to stop, or may be: a SIGTERM is held."""
        return not self._is_over and (self._is_held or self._is_told)

    def signalled(self) -> bool:
        """SIGTERM has arrived. Returns whether it takes effect now."""
        if self._is_over:
            return True
        self._is_held = True
        return False

    def heard(self, word: Word) -> bool:
        """The supervisor has said something. Returns whether a held signal takes effect now."""
        self._is_told = True
        if word is not Word.END:
            return False
        return self.over()

    def moment_over(self) -> bool:
        """The moment after the first signal is over. Returns whether the signal takes effect now."""
        return not self._is_told and self.over()

    def over(self) -> bool:
        """The session is over: signals take effect again. Returns whether one was held."""
        self._is_over = True
        held, self._is_held = self._is_held, False
        return held


class Termination:
    """Holds this process's SIGTERM while its session runs, and drops a SIGHUP behind it.

    When the signal takes effect, a handler of the script's own runs.
    """

    def __init__(self) -> None:
        self._decision = Decision()
        self._before: Any = None
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """Hold signals from now on. Only the main thread can; otherwise they take effect at once."""
        before = signal.getsignal(signal.SIGTERM)
        # Ignored, or handled by somebody's C code: leave it alone.
        if before in {signal.SIG_IGN, None}:
            return
        if threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGTERM, self._take)
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
                signal.signal(signal.SIGHUP, self._take_hangup)

    def heed(self, word: Word) -> None:
        """The supervisor says something. Called in the thread that listens to it."""
        held = self._decision.heard(word)
        if word is Word.END and self._before is signal.SIG_DFL:
            # The main thread may hang outside of Python, where it never gets to a handler.
            linux.act_by_default(signal.SIGTERM)
            held = True
        if held:
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self) -> None:
        """Signals act as they did before :meth:`begin`. One that was held takes effect now."""
        if self._timer is not None:
            self._timer.cancel()
        held = self._decision.over()
        self._restore()
        if held:
            os.kill(os.getpid(), signal.SIGTERM)

    def forget(self) -> None:
        """The held signal has been dealt with."""
        self._decision.over()
        self._restore()

    def _restore(self) -> None:
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self._before)
        self._before = None
        if signal.getsignal(signal.SIGHUP) == self._take_hangup:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._decision.signalled():
            self._restore()
            os.kill(os.getpid(), number)
        elif self._timer is None:
            self._timer = threading.Timer(MOMENT, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    def _take_hangup(self, number: int, frame: FrameType | None) -> None:
        if not self._decision.is_stopping:
            timer = threading.Timer(BEHIND, self._hang_up)
            timer.daemon = True
            timer.start()

    def _hang_up(self) -> None:
        if not self._decision.is_stopping:
            linux.act_by_default(signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)

    def _give_up(self) -> None:
        if self._decision.moment_over():
            os.kill(os.getpid(), signal.SIGTERM)


class Children:
    """Processes that never get SIGTERM or SIGHUP: the last steps still need a loader's workers.

    Python ends its daemonic children by SIGTERM when it exits, and waits for them. These are killed instead, just before that.
    """

    def __init__(self) -> None:
        self._started: WeakSet[BaseProcess] = WeakSet()
        util.Finalize(None, _kill, (self._started,), exitpriority=0)

    @contextmanager
    def kept(self) -> Generator[None, None, None]:
        """Processes started in this block are such children."""
        earlier = active_children()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._started.update(each for each in active_children() if each not in earlier)


def _kill(children: WeakSet[BaseProcess]) -> None:
    deaf = [each for each in active_children() if each.daemon and each in children]
    if deaf and threading.current_thread() is threading.main_thread():
        # Torch's handler raises an error for each worker that is killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in deaf:
        each.kill()
