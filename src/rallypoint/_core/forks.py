"""Forks: a child has its parent's memory, copies of its descriptors, and none of its threads.

Objects that belong to the parent alone are registered here, and abandoned in the child before other code runs there:

- Descriptors are closed. An open copy in the child would hide the parent's end from its peers.
- Objects with threads, or with state shared with another process, have their ``abandon`` called.

The hooks are registered with Python on first use. Forks that Python does not see (in C code) usually exec, which
closes all our descriptors.
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
    """For example a socket. Closing the child's copy must not affect the peer while the parent has its own."""

    def close(self) -> object: ...


class Inherited(Protocol):
    """An object that belongs to the parent."""

    def abandon(self) -> None:
        """Called in the child. Must not wait for a lock: the thread that holds it may not exist there."""


C = TypeVar("C", bound=Closeable)

# Identifies this process: a new object in each child. Objects keep it to detect that they were forked.
process = object()

_closeables: weakref.WeakSet[Closeable] = weakref.WeakSet()
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
_functions: list[Callable[[], None]] = []
_is_registered = False
# Held from the creation of a descriptor until it is registered; forks wait for it.
_gate = threading.RLock()


@contextmanager
def opening() -> Iterator[None]:
    """Delay forks while a descriptor is created and passed to :func:`close_in_child`. The block must not wait."""
    _register()
    with _gate:
        yield


def close_in_child(each: C) -> C:
    """Close this descriptor's copy in children. Returns ``each``."""
    _register()
    _closeables.add(each)
    return each


def abandon_in_child(each: Inherited) -> None:
    """Call ``each.abandon()`` in children, while the object is alive."""
    _register()
    _inherited.add(each)


def call_in_child(act: Callable[[], None]) -> None:
    """Call a module's function in children. Registering it twice has no effect."""
    _register()
    if act not in _functions:
        _functions.append(act)


class Lock:
    """A module's lock that is free in a child, even if a thread of the parent held it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known_in: object = None  # the process in which forks know of it

    def abandon(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, timeout: float = -1) -> bool:
        """As for :class:`threading.Lock`; a negative ``timeout`` waits forever."""
        if self._known_in is not process:
            abandon_in_child(self)
            self._known_in = process
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            pass  # in a child forked by the thread that holds it, it is free already

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _register() -> None:
    global _is_registered  # noqa: PLW0603  # Python keeps such hooks for as long as it runs
    if _is_registered:
        # Do not take the gate: registering an object need not wait for a fork in progress.
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
    # If one raises, the others still run; Python reports the error afterwards.
    with contextlib.ExitStack() as acts:
        for act in _functions:
            acts.callback(act)
        for sock in closeables:
            acts.callback(sock.close)
        for each in inherited:
            acts.callback(each.abandon)
