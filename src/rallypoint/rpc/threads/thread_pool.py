"""A thread pool in which one thread leads and the others follow: the leader reads, and runs what it reads itself.

Theory of operation
-------------------
Handing a request from the thread that reads it to a thread that runs it costs more than most calls take. In the
leader/followers pattern (Schmidt, O'Ryan, Kircher, Pyarali and Buschmann, "Leader/Followers", PLoP 2000) one thread,
the *leader*, waits for input and runs each job itself. The pattern promotes a follower before each job. Here the
leader keeps the lead as long as its jobs are short, so that a short job costs no hand-over at all. A job that turns
out long loses its thread the lead: a follower takes over the reading, and the thread goes on with its job as a plain
worker. No job has to say beforehand how long it takes.

- A job that is about to wait for another process says so (:meth:`ThreadPool.waiting`) and gives up the lead at once.
- Any other long job is noticed by the *overseer*, a thread that wakes every :data:`TICK` while there is work at all.
- A job that is known to be long hands itself to a follower (:meth:`ThreadPool.submit`) in the first place.

At most ``limit`` threads run jobs at once; further jobs wait in line. Threads that wait for other processes do not
count, so nested calls cannot use the pool up. There is always a leader, whatever the other threads do.

A token decides who leads. The leader puts it into a dict when it begins a job, under the job's number, and takes it
back when the job is done. The overseer takes it, too. Whoever gets it has the lead: a dict's pop is atomic.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol


logger = logging.getLogger(__name__)

# How long a job may hold up the reading. Half of the interpreter's own switch interval: shorter brings nothing.
TICK = 0.0025
# The overseer sleeps until it is called when nothing has happened for so many ticks.
_QUIET_TICKS = 20
# Threads that wait for work longer than this end, but for a few.
_IDLE_SECONDS = 30.0
_KEPT_IDLE = 2
_MISTAKE = "a job failed: this is a mistake of Rallypoint's, please report it"


class Job(Protocol):
    """Something to do."""

    def run(self) -> None:
        """Do it, or have it done (:meth:`ThreadPool.submit`) if it is known to take long. Raises nothing."""


class Source(Protocol):
    """Where jobs come from. Called by the leader alone."""

    def poll(self, jobs: deque[Job]) -> None:
        """Wait for input and append what is to be done; returns as well when it is woken."""

    def wake(self) -> None:
        """Have :meth:`poll` return. Called by any thread."""

    def flush(self) -> None:
        """Nothing more is at hand: what was held back to go out together goes out now."""


class _Parked:
    """A thread that waits for something to do."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


class _Mine(threading.local):
    pool: ThreadPool | None = None
    waits: int = 0


_mine = _Mine()


def waiting() -> AbstractContextManager[None]:
    """Around waiting, in a function that is being served: others are served meanwhile."""
    pool = _mine.pool
    return nullcontext() if pool is None else pool.waiting()


class ThreadPool:
    """The threads of one agent: a leader/followers pool.

    Args:
        name: for the threads' names.
        limit: how many jobs are done at once; those that wait for other processes do not count.
        source: where jobs come from.
        due: called by the overseer with the time: does what is due, and returns when it wants to be called next.
        tick: called by the overseer every ``TICK`` while there is work.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        source: Source,
        due: Callable[[float], float | None],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._tick = tick
        self._name = name
        self._limit = limit
        self._source = source
        self._due = due
        self._jobs: deque[Job] = deque()
        self._token: dict[int, bool] = {}
        self._serial = 0
        self._lock = threading.Lock()
        # Under the lock:
        self._leader: int | None = None
        self._parked: deque[_Parked] = deque()
        self._line: deque[Job] = deque()
        self._working = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._is_inherited = False
        self._number = 0
        # Threads that were woken or started to look for work, and have not looked yet.
        self._coming = 0
        # The overseer sleeps until this is set.
        self._call = threading.Event()
        self._overseer_sleeps = False
        self._wake_at: float | None = None

    def start(self) -> None:
        with self._lock:
            self._coming += 1
            self._spawn()
            overseer = threading.Thread(
                target=self._oversee, name=f"{self._name}-overseer", daemon=True
            )
            self._threads.add(overseer)
        overseer.start()

    # -- for jobs and for other threads ----------------------------------------------------------

    @staticmethod
    def current() -> ThreadPool | None:
        """The pool that the calling thread belongs to."""
        return _mine.pool

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around waiting for another process, on a thread of the pool: somebody else leads and works meanwhile."""
        if _mine.waits:
            yield
            return
        _mine.waits = 1
        self._step_down()
        with self._lock:
            self._working -= 1
            self._employ()
        try:
            yield
        finally:
            _mine.waits = 0
            with self._lock:
                # Beyond the limit, if need be: a job that has begun is not held up.
                self._working += 1

    def submit(self, job: Job) -> None:
        """Have a job done, by anyone but the leader."""
        with self._lock:
            self._line.append(job)
            self._employ()

    def wake_at(self, when: float) -> None:
        """Something will be due at this time (monotonic seconds)."""
        with self._lock:
            if self._wake_at is not None and self._wake_at <= when:
                return
            self._wake_at = when
        self._call.set()

    def attend(self) -> None:
        """Have the overseer's ticks go on."""
        if self._overseer_sleeps:
            self._call.set()

    @property
    def due_at(self) -> float | None:
        """When the overseer looks next for what is due."""
        return self._wake_at

    def leads(self) -> bool:
        """Whether the calling thread leads: it should do nothing long."""
        return self._leader == threading.get_ident()

    def counts(self) -> tuple[int, int]:
        """Threads that are idle, and jobs that wait in line."""
        return len(self._parked), len(self._line)

    def close(self, timeout: float) -> bool:
        """End all threads but those that are in the middle of a job; True if none is left."""
        with self._lock:
            self._closed = True
            parked = list(self._parked)
            self._parked.clear()
            threads = list(self._threads)
        for each in parked:
            each.lock.release()
        self._call.set()
        self._source.wake()
        until = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(
            thread.is_alive() for thread in threads if thread is not threading.current_thread()
        )

    def take_left(self) -> list[Job]:
        """The jobs that no thread will do any more, after :meth:`close`."""
        left: list[Job] = []
        for each in (self._jobs, self._line):
            while each:
                left.append(each.popleft())
        return left

    def abandon(self) -> None:
        """In a forked child, which has none of the threads but perhaps one: that which forked, in a job."""
        self._is_inherited = True
        self._lock = threading.Lock()
        self._call = threading.Event()
        self._closed = True
        for each in (self._token, self._parked, self._jobs, self._line, self._threads):
            each.clear()
        _mine.pool = None
        _mine.waits = 0

    # -- threads ---------------------------------------------------------------------------------

    def _spawn(self) -> None:
        """Under the lock."""
        self._number += 1
        thread = threading.Thread(
            target=self._main, name=f"{self._name}-{self._number}", daemon=True
        )
        self._threads.add(thread)
        thread.start()

    def _employ(self) -> None:
        """Have somebody look for work, if there is some that may be begun. Under the lock."""
        if self._closed:
            return
        wanted = (self._leader is None) + min(len(self._line), self._limit - self._working)
        if wanted <= self._coming:
            return
        self._coming += 1
        if self._parked:
            # The one that has waited shortest: its memory is warm.
            self._parked.pop().lock.release()
        else:
            self._spawn()

    def _main(self) -> None:
        _mine.pool = self
        me = threading.get_ident()
        comes = True
        try:
            while True:
                job: Job | None = None
                parked: _Parked | None = None
                with self._lock:
                    if comes:
                        self._coming -= 1
                        comes = False
                    if self._closed:
                        return
                    if self._leader is None:
                        self._leader = me
                    elif self._line and self._working < self._limit:
                        job = self._line.popleft()
                        self._working += 1
                        self._employ()
                    else:
                        parked = _Parked()
                        self._parked.append(parked)
                if parked is not None:
                    if self._park(parked):
                        comes = True
                        continue
                    return
                if job is not None:
                    try:
                        job.run()
                    except BaseException:
                        logger.exception(_MISTAKE)
                    # The leader may be asleep: what this job has held back waits for nobody else.
                    self._source.flush()
                    with self._lock:
                        self._working -= 1
                    continue
                self._lead()
        finally:
            if self._is_inherited:
                _end_child()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _park(self, parked: _Parked) -> bool:
        """Wait to be woken; False if this thread is not needed any more."""
        if parked.lock.acquire(timeout=_IDLE_SECONDS):
            return True
        with self._lock:
            if parked not in self._parked:
                return True
            if len(self._parked) > _KEPT_IDLE:
                self._parked.remove(parked)
                return False
        parked.lock.acquire()
        return True

    def _lead(self) -> None:
        """Read and do jobs until the lead is lost, or all ends. The thread does not count as working."""
        jobs, token, source = self._jobs, self._token, self._source
        while not self._closed:
            while jobs:
                try:
                    job = jobs.popleft()
                except IndexError:
                    break
                if self._working >= self._limit:
                    with self._lock:
                        self._line.append(job)
                        self._employ()
                    continue
                self._serial = serial = self._serial + 1
                token[serial] = True
                if self._overseer_sleeps:
                    self._call.set()
                try:
                    job.run()
                except BaseException:
                    # A thread that ends here would take the lead with it: nobody would read any more.
                    logger.exception(_MISTAKE)
                # What it holds goes now, not when the next one comes.
                del job
                if not token.pop(serial, False):
                    # Somebody else leads: this was the job of a worker, and it is done.
                    source.flush()
                    with self._lock:
                        self._working -= 1
                    return
            source.flush()
            source.poll(jobs)
        source.flush()
        with self._lock:
            self._leader = None

    def _step_down(self) -> bool:
        """Give the lead up, if the calling thread has it, in the middle of a job."""
        if self._leader != threading.get_ident():
            return False
        return self._depose(self._serial)

    def _depose(self, serial: int) -> bool:
        """Take the lead from a leader that is in the middle of this job. False if it has just finished it."""
        if not self._token.pop(serial, False):
            return False
        with self._lock:
            self._leader = None
            self._working += 1
            self._employ()
        return True

    # -- the overseer ----------------------------------------------------------------------------

    def _oversee(self) -> None:
        _mine.pool = self
        quiet = 0
        try:
            while not self._closed:
                seen = self._serial
                with self._lock:
                    wake_at = self._wake_at
                now = time.monotonic()
                if wake_at is not None and wake_at <= now:
                    with self._lock:
                        self._wake_at = None
                    following = self._due(now)
                    if following is not None:
                        self.wake_at(following)
                    continue
                left = None if wake_at is None else wake_at - now
                if quiet >= _QUIET_TICKS and not self._token:
                    self._overseer_sleeps = True
                    # Whoever calls from here on sees that it sleeps.
                    self._tick()
                    if self._serial == seen and not self._token:
                        self._call.wait(left)
                    self._overseer_sleeps = False
                    self._call.clear()
                    quiet = 0
                    continue
                self._call.wait(TICK if left is None else min(left, TICK))
                self._call.clear()
                self._tick()
                if self._serial != seen:
                    quiet = 0
                elif self._token:
                    # The same job as a tick ago.
                    self._depose(seen)
                    quiet = 0
                else:
                    quiet += 1
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())


def _end_child() -> None:
    """End a child that has come back out of the job in which it was forked: there is nothing else that it could do.

    Python would do the same when its last thread ends, but with torch in the process it aborts on the way.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(0)
