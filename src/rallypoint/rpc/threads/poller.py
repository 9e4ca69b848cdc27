"""The events that the pool's leader waits for: readable and writable sockets, in one epoll."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from rallypoint.wire.busy_wait import LOOK, SPIN, BusyWait

from .thread_pool import Job


logger = logging.getLogger(__name__)

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
_BROKEN = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


class Handler(Protocol):
    """Called by the leader when a descriptor is ready. Must not block or raise."""

    def on_ready(self, mask: int, jobs: deque[Job]) -> None: ...


class Poller:
    """An epoll whose descriptors each have a handler.

    Args:
        on_wake: called by the leader after :meth:`wake`.
    """

    def __init__(self, on_wake: Callable[[deque[Job]], None]) -> None:
        self._on_wake = on_wake
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, READ)
        self._lock = threading.Lock()
        self._handlers: dict[int, Handler] = {}
        self._masks: dict[int, int] = {}
        self._dirty: deque[Dirty] = deque()
        self._closed = False
        self._busy_wait = BusyWait()

    def add(self, fd: int, handler: Handler, mask: int = READ) -> None:
        """Watch a descriptor."""
        with self._lock:
            self._handlers[fd] = handler
            self._masks[fd] = mask
            self._epoll.register(fd, mask)

    def change(self, fd: int, *, on: int = 0, off: int = 0) -> None:
        """Change the watched events. Does nothing for a descriptor that is not watched."""
        with self._lock:
            before = self._masks.get(fd)
            if before is None:
                return
            after = (before | on) & ~off
            if after != before:
                self._masks[fd] = after
                self._epoll.modify(fd, after)

    def remove(self, fd: int) -> None:
        """Stop watching a descriptor. Idempotent."""
        with self._lock:
            if self._handlers.pop(fd, None) is not None:
                del self._masks[fd]
                with contextlib.suppress(OSError):
                    self._epoll.unregister(fd)

    # -- the pool's Source ------------------------------------------------------------------------

    def poll(self, jobs: deque[Job]) -> None:
        try:
            ready = self._spin() if self._busy_wait.is_worth_it() else []
            if not ready:
                began = perf_counter()
                ready = self._epoll.poll()
                self._busy_wait.slept(perf_counter() - began)
        except ValueError:
            # Closed meanwhile.
            return
        for fd, mask in ready:
            if fd == self._wake:
                with contextlib.suppress(OSError):
                    os.eventfd_read(self._wake)
                self._on_wake(jobs)
                continue
            handler = self._handlers.get(fd)
            if handler is None:
                continue
            try:
                handler.on_ready(mask, jobs)
            except Exception:
                # A bug of ours, which must not end the thread that serves all peers.
                logger.exception("the handler of descriptor %d failed: please report this bug", fd)
                self.remove(fd)

    def _spin(self) -> list[tuple[int, int]]:
        """Poll for a short time without sleeping."""
        poll, now = self._epoll.poll, perf_counter()
        until = now + SPIN
        while True:
            ready, before, now = poll(0), now, perf_counter()
            is_undisturbed = now - before < LOOK
            if ready or not is_undisturbed or now > until:
                self._busy_wait.tried(bool(ready) and is_undisturbed)
                return ready

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def hold_back(self, dirty: Dirty) -> None:
        """Have it flushed when no more jobs are at hand."""
        self._dirty.append(dirty)

    def flush(self) -> None:
        while self._dirty:
            try:
                dirty = self._dirty.popleft()
            except IndexError:
                return
            dirty.flush()

    def abandon(self) -> None:
        """In a forked child. The epoll and the eventfd are shared with the parent: close, but do not change them."""
        self._lock = threading.Lock()
        self._dirty.clear()
        self.close()

    def close(self) -> None:
        """Call this only when no thread polls any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._handlers.clear()
            self._masks.clear()
            self._epoll.close()
            os.close(self._wake)


class Dirty(Protocol):
    """Has data that was held back."""

    def flush(self) -> None: ...
