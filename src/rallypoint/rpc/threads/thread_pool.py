"""A leader/followers thread pool: the thread that reads requests also runs them.

Theory of operation
-------------------
Handing a request from the thread that reads it to a thread that runs it costs more than most calls take. In the
leader/followers pattern (Schmidt, O'Ryan, Kircher, Pyarali and Buschmann, "Leader/Followers", PLoP 2000) one thread,
the *leader*, waits for input and runs each job itself. The pattern promotes a follower before each job. Here the
leader keeps the lead as long as its jobs are short, so that a short job needs no hand-over at all. If a job turns out
to be long, a follower becomes the leader, and the thread goes on with its job as a plain worker. No job has to say
in advance how long it takes.

- A job that is about to wait for another process says so (:meth:`ThreadPool.waiting`) and gives up the lead at once.
- Any other long job is noticed by the *overseer*, a thread that wakes every :data:`TICK` while there is work.
- A job that is known to be long hands itself to a follower (:meth:`ThreadPool.submit`).

At most ``limit`` threads run jobs at once, the leader among them; further jobs wait in line, and start in the order of
arrival. Threads that wait for other processes do not count, so nested calls cannot exhaust the pool. Answers to the
worker's own calls do not wait in line (:class:`Answer`). There is always a leader.

A token decides which thread leads. The leader puts it into a dict when it starts a job, under the job's number, and
pops it when the job is done. The overseer pops it to take the lead away. A dict's pop is atomic: only one of them gets
it. The token also counts the leader's job against the limit. No lock is taken for that: the leader puts it there (as
False: not to be taken yet) before it checks how many others are working, and those count themselves before they check
for a token. So at least one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol


logger = logging.getLogger(__name__)

# Seconds that a job may delay reading: half of the interpreter's switch interval. Smaller values have no effect.
TICK = 0.0025
# After this many ticks without work, the overseer sleeps until it is woken.
_QUIET_TICKS = 20
# Threads that are idle for this many seconds exit, except for a few.
_IDLE_SECONDS = 30.0
_KEPT_IDLE = 2
_BUG = "a job of the thread pool failed: please report this bug"


class Job(Protocol):
    def run(self) -> None:
        """Do the job, or hand it over (:meth:`ThreadPool.submit`) if it is known to be long. Must not raise."""


class Answer:
    """A job that completes what others wait for.

    It does not wait in line: all threads at work may be waiting for it, in code that cannot say so (torch.futures.wait_all).

    Attributes:
        may_wait: whether it may itself wait. At most ``limit`` of these run in addition to the jobs that the limit is for.
    """

    __slots__ = ()
    may_wait: ClassVar[bool] = False


class _Counted:
    """A job that is in a set while it runs."""

    __slots__ = ("_job", "_running")

    def __init__(self, running: set[object], job: Job) -> None:
        self._running = running
        self._job = job

    def run(self) -> None:
        self._running.add(self)
        try:
            self._job.run()
        finally:
            self._running.discard(self)


class Source(Protocol):
    """Where jobs come from. Only the leader calls :meth:`poll`."""

    def poll(self, jobs: deque[Job]) -> None:
        """Wait for input or :meth:`wake`, and append jobs."""

    def wake(self) -> None:
        """Have :meth:`poll` return. Any thread may call this."""

    def flush(self) -> None:
        """Send what was held back: no more jobs are at hand."""


class _Parked:
    """An idle thread."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


class _Mine(threading.local):
    pool: ThreadPool | None = None
    waits: int = 0


_mine = _Mine()


def waiting() -> AbstractContextManager[None]:
    """A block around waiting for another process, on any thread: the pool serves others meanwhile."""
    pool = _mine.pool
    return nullcontext() if pool is None else pool.waiting()


class _Waiting(AbstractContextManager[None]):
    """The block of :meth:`ThreadPool.waiting`.

    A class, since contextlib's generators assign to the exceptions that leave a block, which not every exception allows.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._pool.begin_to_wait()

    def __exit__(self, *_: object) -> None:
        self._pool.go_on()


class ThreadPool:
    """The threads of one agent.

    Args:
        name: for the threads' names.
        limit: how many jobs run at once, not counting those that wait for other processes.
        source: where jobs come from.
        due: called by the overseer with the time, for timers; returns when to call it next.
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
        # Threads that were woken or started and have not taken a job yet.
        self._coming = 0
        # Answers that run beyond the limit. Changed by single set operations, which are atomic.
        self._answering: set[object] = set()
        # Wakes the overseer.
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

    def waiting(self) -> AbstractContextManager[None]:
        """As the function :func:`waiting`, on a thread of this pool."""
        return nullcontext() if _mine.waits else _Waiting(self)

    def begin_to_wait(self) -> None:
        _mine.waits = 1
        self._step_down()
        with self._lock:
            self._working -= 1
            self._employ()

    def go_on(self) -> None:
        """After :meth:`begin_to_wait`."""
        _mine.waits = 0
        with self._lock:
            # Perhaps beyond the limit: a job that has started goes on.
            self._working += 1

    def submit(self, job: Job) -> None:
        """Queue a job for a thread other than the leader."""
        with self._lock:
            self._line.append(job)
            self._employ()

    def lead(self, add: Callable[[deque[Job]], None]) -> None:
        """Have the leader run the jobs that ``add`` appends."""
        add(self._jobs)
        self._source.wake()

    def wake_at(self, when: float) -> None:
        """Have ``due`` called at this time (monotonic seconds)."""
        with self._lock:
            if self._wake_at is not None and self._wake_at <= when:
                return
            self._wake_at = when
        self._call.set()

    def attend(self) -> None:
        """Wake the overseer, so that its ticks continue."""
        if self._overseer_sleeps:
            self._call.set()

    @property
    def due_at(self) -> float | None:
        """When ``due`` is called next."""
        return self._wake_at

    def leads(self) -> bool:
        """Whether the calling thread is the leader, which must not block."""
        return self._leader == threading.get_ident()

    def counts(self) -> tuple[int, int]:
        """The numbers of idle threads and of queued jobs."""
        return len(self._parked), len(self._line)

    def close(self, timeout: float) -> bool:
        """Stop all threads that are not running a job; True if none is left."""
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
        """The jobs that were not run, after :meth:`close`."""
        left: list[Job] = []
        for each in (self._jobs, self._line):
            # A thread that is still running a job may take some.
            with contextlib.suppress(IndexError):
                while True:
                    left.append(each.popleft())
        return left

    def abandon(self) -> None:
        """In a forked child, which has at most one of the threads: the one that forked while it ran a job."""
        self._is_inherited = True
        self._lock = threading.Lock()
        self._call = threading.Event()
        self._closed = True
        for each in (
            *(self._token, self._parked, self._jobs),
            *(self._line, self._threads, self._answering),
        ):
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
        """Wake or start a thread if there is a job that may start, or no leader. Under the lock."""
        if self._closed:
            return
        free = max(0, self._limit - self._working - len(self._token))
        wanted = (self._leader is None) + min(len(self._line), free)
        if wanted <= self._coming:
            return
        self._coming += 1
        if self._parked:
            # The most recently used thread: its caches are warm.
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
                    elif self._line and self._takes_part():
                        job = self._line.popleft()
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
                        logger.exception(_BUG)
                    # The leader may be asleep and would not send what this job has held back.
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

    def _takes_part(self) -> bool:
        """Count the calling thread as working, unless the limit is reached. Under the lock."""
        self._working += 1
        # In this order: see the theory of operation.
        if self._working + len(self._token) <= self._limit:
            return True
        self._working -= 1
        return False

    def _park(self, parked: _Parked) -> bool:
        """Wait to be woken; False if this thread is no longer needed."""
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
        """Read and run jobs until the lead is lost or the pool closes. The thread is not in ``_working``: its token counts."""
        jobs, token, line, source = self._jobs, self._token, self._line, self._source
        while not self._closed:
            while jobs:
                try:
                    job = jobs.popleft()
                except IndexError:
                    break
                self._serial = serial = self._serial + 1
                token[serial] = False
                # Jobs in line come first, unless there is a thread for each of them.
                if self._working + len(line) >= self._limit:
                    beside = self._beside(job)
                    if beside is None:
                        del token[serial]
                        with self._lock:
                            line.append(job)
                            self._employ()
                        continue
                    job = beside
                token[serial] = True
                if self._overseer_sleeps:
                    self._call.set()
                try:
                    job.run()
                except BaseException:
                    # Must not end the thread: it has the lead.
                    logger.exception(_BUG)
                # Release what it holds now, not when the next job arrives.
                del job
                if not token.pop(serial, False):
                    # Another thread has taken the lead in the meantime.
                    source.flush()
                    with self._lock:
                        self._working -= 1
                    return
                if line:
                    # The leader's job may have kept one of them waiting.
                    with self._lock:
                        self._employ()
            source.flush()
            source.poll(jobs)
        source.flush()
        with self._lock:
            self._leader = None

    def _beside(self, job: Job) -> Job | None:
        """What the leader runs now, although the limit is reached; None if the job has to wait in line."""
        if not isinstance(job, Answer):
            return None
        if not job.may_wait:
            return job
        return _Counted(self._answering, job) if len(self._answering) < self._limit else None

    def _step_down(self) -> bool:
        """Give up the lead during a job, if the calling thread has it."""
        if self._leader != threading.get_ident():
            return False
        return self._depose(self._serial)

    def _depose(self, serial: int) -> bool:
        """Take the lead from a leader that is running this job. False if it has just finished it."""
        with self._lock:
            if not (self._token.get(serial) and self._token.pop(serial, False)):
                return False
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
                    # From here on, attend() sees that the overseer sleeps.
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
                    # The same job as one tick ago.
                    self._depose(seen)
                    quiet = 0
                else:
                    quiet += 1
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())


def _end_child() -> None:
    """Exit from a child that was forked in a job and has returned from it.

    Python would exit anyway, but with torch loaded it aborts on the way out.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(0)
