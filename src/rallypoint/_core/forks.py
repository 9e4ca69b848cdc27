"""Forks: a child has its parent's memory, copies of its descriptors, and none of its threads.

Whatever belongs to the parent alone says so here, and is abandoned in the child before other code runs there:

- Descriptors are closed. A copy that stays open in the child would hide the parent's end from those at the other end.
- Objects that have threads, or share something with another process, have their ``abandon`` called.

Nothing is registered with Python before the first of them. Forks that Python does not see (in C code) are followed by
an exec as a rule, and all descriptors of ours end there by themselves.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar


class Closeable(Protocol):
    """A socket, for example. Closing it must not be heard at the other end as long as the parent has it, too."""

    def close(self) -> object: ...


class Inherited(Protocol):
    """Belongs to the parent."""

    def abandon(self) -> None:
        """Called in the child. Must not wait for a lock: the thread that holds it may not exist there."""


C = TypeVar("C", bound=Closeable)

# Stands for this process: another object in each child. What is made here keeps it, and compares.
process = object()

_closeables: weakref.WeakSet[Closeable] = weakref.WeakSet()
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
_functions: list[Callable[[], None]] = []
_is_registered = False
# Held while a descriptor is made, until it is known here: a fork waits for that.
_gate = threading.RLock()


@contextmanager
def opening() -> Iterator[None]:
    """Around making a descriptor, until :func:`close_in_child` knows it. Nothing in it may wait."""
    _register()
    with _gate:
        yield


def close_in_child(each: C) -> C:
    """Have the copy of this descriptor closed in children; returns it."""
    _register()
    _closeables.add(each)
    return each


def abandon_in_child(each: Inherited) -> None:
    """Have ``each.abandon()`` called in children, as long as anybody refers to it."""
    _register()
    _inherited.add(each)


def call_in_child(act: Callable[[], None]) -> None:
    """Have a function of a module called in children. A second call with the same one does nothing."""
    _register()
    if act not in _functions:
        _functions.append(act)


class Lock:
    """A lock that a module keeps: a child gets it free, whichever of its parent's threads held it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def abandon(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        abandon_in_child(self)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        # In a child of the thread that held it, it is free already.
        with contextlib.suppress(RuntimeError):
            self._lock.release()


def _register() -> None:
    global _is_registered  # noqa: PLW0603  # Python keeps such hooks for as long as it runs
    if _is_registered:
        # Without the gate: who only makes something known need not wait until a fork is done.
        return
    with _gate:
        if not _is_registered:
            _is_registered = True
            os.register_at_fork(
                before=lambda: _gate.acquire(),
                after_in_parent=lambda: _gate.release(),
                after_in_child=_in_child,
            )


def _in_child() -> None:
    global process, _gate  # noqa: PLW0603  # of this process
    process = object()
    _gate = threading.RLock()
    inherited, closeables = list(_inherited), list(_closeables)
    _inherited.clear()
    _closeables.clear()
    # A mistake in one of them is told by Python at the end, and keeps nothing else from being abandoned.
    with contextlib.ExitStack() as acts:
        for act in _functions:
            acts.callback(act)
        for sock in closeables:
            acts.callback(sock.close)
        for each in inherited:
            acts.callback(each.abandon)
