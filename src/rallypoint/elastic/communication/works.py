"""Waiting for Gloo, but not longer than its connections live.

When a connection ends, Gloo wakes everybody who waits for it, except for those whose message was already queued, or half read
(``gloo/transport/tcp/pair.cc``, ``signalException``). They would wait until the collective's time-out, half an hour by default. So
a collective of a kept group is waited for in slices, and given up once its connections have been shut for a while.
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


# Seconds of one slice: so late somebody learns at worst that a collective was given up.
SLICE = 0.25
GIVEN_UP = "the connections of this collective were closed because a member was lost"

T = TypeVar("T")
# What a failed collective raises instead, if a loss explains it; of None: whether a loss was told already.
Explain = Callable[[BaseException | None], Exception | None]


class Lives:
    """Whether the connections of a generation can still bring anything, and the futures that count on them. Thread-safe."""

    def __init__(self) -> None:
        self.are_over = False
        self._pending: dict[int, Callable[[], None]] = {}

    def count_on(self, work: object, give_up: Callable[[], None]) -> None:
        """Call ``give_up`` at the end, unless :meth:`claim` came first."""
        self._pending[id(work)] = give_up
        if self.are_over:
            self.end()

    def claim(self, work: object) -> bool:
        """Whether the caller is the one to complete it: True once."""
        return self._pending.pop(id(work), None) is not None

    def end(self) -> None:
        """Nothing comes any more: give up everything."""
        self.are_over = True
        while self._pending:
            try:
                _, give_up = self._pending.popitem()
            except KeyError:
                return
            give_up()


class WrappedWork(dist.Work):
    """A backend's work; what waiting for it means is for subclasses to say."""

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
            # DDP's reducer holds a work for as long as it lives, and this holds the session, and with it the model.
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
                    # The slice may have ended at this very moment: this returns at once, or raises what went wrong.
                    return inner.wait()
                if lives.are_over:
                    raise RuntimeError(GIVEN_UP) from None
                if is_last:
                    raise

    def get_future(self) -> Any:
        """A future of the result, for C++: it cannot wait in slices."""
        if self._future is None:
            # C++ sees a future as failed only if a callback has raised: `set_exception` sets a value that Python raises.
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
        observer: called when it has ended well.
    """

    def __init__(
        self, inner: dist.Work, lives: Lives, timeout: timedelta, explain: Explain | None = None
    ) -> None:
        super().__init__(inner, lives, explain)
        self._timeout = timeout
        self.observer: Callable[[], None] | None = None

    def _wait(self, timeout: timedelta | None) -> bool:
        # Without a time, Gloo takes the one that its connections were formed with. And it ends the connection with the first
        # wait that is too short, so there are no slices.
        inner, left = self._inner, timeout or self._timeout
        ended = attended(lambda: inner.wait(left), self._lives)
        observer, self.observer = self.observer, None
        if observer is not None:
            observer()
        return ended

    def get_future(self) -> Any:
        return self._inner.get_future()


def attended(function: Callable[[], T], lives: Lives) -> T:
    """Call a function that waits for Gloo where that cannot wait in slices, as for point-to-point messages.

    It runs in another thread, which is left behind if it is given up; what it waits for ends with its connections, or in time.

    Raises:
        RuntimeError: a member is lost, and Gloo does not notice.
        BaseException: as the function.
    """
    call = Call(function)
    while not call.ends_within(SLICE):
        # A little longer: it may have been between two messages.
        if lives.are_over and not call.ends_within(2 * SLICE):
            raise RuntimeError(GIVEN_UP)
    return call.result()


def done(result: Any, source: int = 0) -> dist.Work:
    """Work that has ended.

    Args:
        result: tensors, in lists or not; anything else is left out.
        source: of a message: the rank in the group that it is from.
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
    """The tensors in what an operation is given: one, or lists of them."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from flat(each)


def dispose(group: Any) -> None:
    """Drop a torch group whose connections have ended, in a thread: its destructor waits for all of its works.

    Args:
        group: in a list, which is emptied: no other reference must be left.
    """
    threading.Thread(target=group.clear, name="rally-elastic-disposal", daemon=True).start()
