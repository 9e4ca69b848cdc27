"""Waiting for Gloo, but not longer than its connections live.

When a connection ends, Gloo wakes all threads that wait for it, except those whose message was already queued or half read
(``gloo/transport/tcp/pair.cc``, ``signalException``). These would wait until the collective's time-out, half an hour by default.
So a kept group waits for its collectives in slices, and gives them up once the connections have been shut for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rallypoint._core.clock import Deadline

from .waiters import Call


# Seconds of one slice: at worst, a waiting thread learns this late that a collective was given up.
SLICE = 0.25
GIVEN_UP = "the connections of this collective were closed because a member was lost"

T = TypeVar("T")
# What a failed collective raises instead, if a loss explains its error; given None: whether a loss has already been reported.
Explain = Callable[[BaseException | None], Exception | None]


class Lives:
    """Whether the connections of a generation can still bring anything, and the futures that depend on them. Thread-safe."""

    def __init__(self) -> None:
        self.are_over = False
        self._pending: dict[int, Callable[[], None]] = {}

    def count_on(self, work: object, give_up: Callable[[], None]) -> None:
        """Call ``give_up`` at the end, unless :meth:`claim` came first."""
        self._pending[id(work)] = give_up
        if self.are_over:
            self.end()

    def claim(self, work: object) -> bool:
        """Whether the caller is the one to complete the work. True only once."""
        return self._pending.pop(id(work), None) is not None

    def end(self) -> None:
        """Nothing will arrive any more: give up everything."""
        self.are_over = True
        while self._pending:
            try:
                _, give_up = self._pending.popitem()
            except KeyError:
                return
            give_up()


class WrappedWork(dist.Work):
    """A backend's work. Subclasses define what waiting for it means."""

    def __init__(self, inner: dist.Work) -> None:
        super().__init__()
        self._inner = inner

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._inner.result()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    _source_rank = source_rank

    def get_future_result(self) -> Any:
        return self._inner.get_future_result()  # type: ignore[attr-defined]  # missing in torch's stubs


class KeptWork(WrappedWork):
    """The work of a collective, as torch gives it to users, DDP and compiled graphs.

    Args:
        inner: Gloo's.
        lives: of its connections.
        explain: what is raised instead of an error.
    """

    def __init__(self, inner: dist.Work, lives: Lives, explain: Explain | None = None) -> None:
        super().__init__(inner)
        self._explain = explain
        self._lives = lives
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has ended.

        Raises:
            MembershipChanged: a member is lost, in a session.
            RuntimeError: it failed, did not end in time, or a member is lost.
        """
        try:
            completed = self._wait(timeout)
            # DDP's reducer keeps a work as long as it lives itself, and `_explain` holds the session, and with it the model.
            self._explain = None
            return completed
        except RuntimeError as error:
            changed = None if self._explain is None else self._explain(error)
            if changed is None:
                raise
            raise changed from error

    def _wait(self, timeout: timedelta | None) -> bool:
        inner, lives = self._inner, self._lives
        deadline = Deadline(timeout.total_seconds() if timeout else None)
        while True:
            left = deadline.remaining()
            is_last = left is not None and left <= SLICE
            try:
                return inner.wait(timedelta(seconds=left if is_last and left else SLICE))
            except RuntimeError:
                if inner.is_completed():
                    # The work may have ended just as the slice did: this returns at once, or raises what went wrong.
                    return inner.wait()
                if lives.are_over:
                    raise RuntimeError(GIVEN_UP) from None
                if is_last:
                    raise

    def get_future(self) -> Any:
        """A future of the result, for C++, which cannot wait in slices."""
        if self._future is None:
            # C++ sees a future as failed only if a callback has raised: `set_exception` sets a value, which Python then raises.
            gate: Any = torch.futures.Future()
            self._future = gate.then(self._outcome)
            self._lives.count_on(self, lambda: gate.set_result(None))
            self._inner.get_future().add_done_callback(lambda done: self._finish(done, gate))
        return self._future

    def _finish(self, done: Any, gate: Any) -> None:
        if self._lives.claim(self):
            gate.set_result(done)

    @staticmethod
    def _outcome(gate: Any) -> Any:
        done = gate.value()
        if done is None:
            raise RuntimeError(GIVEN_UP)
        return done.value()


class KeptMessage(KeptWork):
    """The work of a message from one rank to another.

    Args:
        inner: Gloo's.
        lives: of its connections.
        timeout: the group's.
        explain: as above.

    Attributes:
        observer: called when it has ended without an error.
    """

    def __init__(
        self, inner: dist.Work, lives: Lives, timeout: timedelta, explain: Explain | None = None
    ) -> None:
        super().__init__(inner, lives, explain)
        self._timeout = timeout
        self.observer: Callable[[], None] | None = None

    def _wait(self, timeout: timedelta | None) -> bool:
        # Without a time-out, Gloo takes the one that its connections were formed with. And it ends the connection at the first
        # wait that times out, so there are no slices.
        inner, left = self._inner, timeout or self._timeout
        ended = attended(lambda: inner.wait(left), self._lives)
        observer, self.observer = self.observer, None
        if observer is not None:
            observer()
        return ended

    def get_future(self) -> Any:
        return self._inner.get_future()


def attended(function: Callable[[], T], lives: Lives) -> T:
    """Call a function that waits for Gloo in a way that cannot be sliced, as point-to-point messages do.

    It runs in another thread, which is left behind if the call is given up; its wait ends with its connections or its time-out.

    Raises:
        RuntimeError: a member is lost, and Gloo does not notice.
        BaseException: whatever the function raises.
    """
    call = Call(function)
    while not call.ends_within(SLICE):
        # Wait a little longer: it may have been between two messages.
        if lives.are_over and not call.ends_within(2 * SLICE):
            raise RuntimeError(GIVEN_UP)
    return call.result()


def done(result: Any, source: int = 0) -> dist.Work:
    """Work that has ended.

    Args:
        result: tensors, in lists or not; anything else is left out.
        source: of a message, the sender's rank in the group.
    """
    return _Done(result, source)


class _Done(dist.Work):
    def __init__(self, result: Any, source: int) -> None:
        super().__init__()
        self._result = result
        self._source = source

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def result(self) -> Any:
        return list(flat(self._result))

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future


def flat(given: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operation's argument: one, or lists of them."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from flat(each)


def dispose(group: Any) -> None:
    """Drop a torch group whose connections have ended, in a thread: its destructor waits for all its works.

    Args:
        group: a list with the group, which is emptied: there must be no other reference.
    """
    threading.Thread(target=group.clear, name="rally-elastic-disposal", daemon=True).start()
