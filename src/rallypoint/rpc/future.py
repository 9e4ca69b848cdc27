"""The answer of a call that is under way: torch's Future, and awaitable, and to be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from torch.futures import Future

from rallypoint._core import forks
from rallypoint.errors import CallCancelled, RallyError, RemoteError, RpcError

from .connections.calls import Call
from .current_agent import ELSEWHERE
from .interruptions import Lent, Rest
from .serialization.payload import refuse_future, register_reducer
from .threads.thread_pool import ThreadPool, waiting
from .torch_private import NativeFuture


logger = logging.getLogger(__name__)

_NO_DEVICES: list[Any] = []
_init = NativeFuture.__init__
_wait = NativeFuture.wait
_done = NativeFuture.done
_call_back = NativeFuture.add_done_callback

T = TypeVar("T")
S = TypeVar("S")


def again(error: BaseException) -> BaseException:
    """A copy of an exception that a future holds, to be raised instead.

    What is raised refers to the frames that it goes through, and so to the future that somebody waits for there.
    torch's futures are C++ objects: through them the garbage collector finds no cycle, and what hangs on one
    that ends in such an error would stay for ever.
    """
    kind = type(error)
    try:
        made: BaseException = copy.copy(error)
        if type(made) is not kind or str(made) != str(error):
            raise TypeError
    except Exception:  # noqa: BLE001  # a constructor that takes something else
        try:
            made = kind.__new__(kind, *error.args)
            made.args = error.args
            vars(made).update(vars(error))
        except Exception:  # noqa: BLE001  # rather a leak than another error
            return error
    made.__cause__ = error.__cause__
    made.__suppress_context__ = error.__suppress_context__
    error.__traceback__ = None
    return made


def _failed(done: Future[Any]) -> bool:
    try:
        Future.value(done)
    except BaseException as error:  # noqa: BLE001  # only whether there is one
        forget_frames(error)  # it is kept, and would keep this one
        return True
    return False


def _of_callback(error: BaseException) -> BaseException:
    """In torch's type and words, unless it is one that says enough by itself."""
    if isinstance(error, RuntimeError | RallyError) or not isinstance(error, Exception):
        return error
    raised = RuntimeError(
        f"Got the following error when running the callback: {type(error).__name__}: {error}"
    )
    raised.__cause__ = error
    return raised


def forget_frames(error: BaseException) -> None:
    """Of an exception that is kept, and of those that led to it: frames hold all that they have seen, and their callers."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            left += [each.__cause__, each.__context__]


class RpcFuture(Future[T]):
    """What ``rpc_async`` returns.

    Everything that takes a ``torch.futures.Future`` takes it. Beyond that it can be awaited in asyncio, given up
    (:meth:`cancel`), and it reports a failure that nobody ever looks at.
    """

    # Without a dict of its own it is one object less, of the many that are under way, for the garbage collector.
    __slots__ = ("_is_seen", "_process", "_unseen", "call", "is_watched")

    def __init__(self) -> None:
        # torch's own constructor only makes a list of devices for this.
        _init(self, _NO_DEVICES)
        self._process = forks.process
        # A future whose call could not be sent has none.
        self.call: Call | None = None
        self._unseen: BaseException | None = None
        self._is_seen = False
        # Somebody else reports the failure, if need be.
        self.is_watched = False

    def wait(self) -> T:
        """Wait for the answer.

        Raises:
            Exception: what the function raised, or why there is no answer.
            RpcError: this process was forked from the one that made the call, and the answer had not come by then.
        """
        if self._process is not forks.process:
            self._check_process()
        call = self.call
        if call is not None and not call.done:
            outgoing = call.outgoing
            pool = ThreadPool.current()
            if pool is None:
                outgoing.wait(call)
            else:
                with pool.waiting():
                    outgoing.wait(call)
        if not _done(self):
            self._sleep()
        return self._value()

    def _sleep(self) -> None:
        """Until it is completed; a signal is felt meanwhile, which torch's own wait does not let through."""
        awake = threading.Lock()
        awake.acquire()
        _call_back(self, lambda _: awake.release())
        rest = Rest.of_main(lambda: None)
        if rest is None:
            with waiting():
                awake.acquire()
            return
        while awake.locked():
            try:
                rest.check()
                rest.call(awake.acquire, True)
                return
            except Lent:
                rest = Rest(lambda: None)

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return _done(self) or self._process is not forks.process

    def _check_process(self) -> None:
        if self._process is not forks.process and not _done(self):
            raise RpcError(
                f"this future belongs to the parent process and never completes in a forked child: {ELSEWHERE}"
            )

    def _look(self) -> None:
        """Somebody looks at the answer, or will when it comes."""
        # In this order: the failure may come in between, and looks whether anybody does.
        self._is_seen = True
        self._unseen = None

    def _value(self) -> T:
        self._look()
        try:
            value: T = _wait(self)
        except BaseException as error:  # noqa: BLE001  # a copy of it is raised
            raised = again(error)
        else:
            return value
        raise raised

    def value(self) -> T:
        self._check_process()
        self._look()
        try:
            return super().value()
        except BaseException as error:  # noqa: BLE001  # a copy of it is raised
            raised = again(error)
        raise raised

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future of what ``callback(this one)`` returns.

        What the callback raises is raised by ``wait``, as with torch's futures: a failure of this future as it is, a
        mistake in the callback itself as a RuntimeError caused by it.

        Raises:
            TypeError: ``callback`` cannot be called.
        """
        if not callable(callback):
            # In torch's words, which programs may look for.
            raise TypeError(
                "then(): incompatible function arguments. Expected a function of one future, got"
                f" {callback!r}"
            )
        following: RpcFuture[S] = RpcFuture()

        def follow(done: Future[T]) -> None:
            try:
                result = callback(done)
            except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
                following.fail(error if _failed(done) else _of_callback(error))
            else:
                following.set_result(result)

        self.add_done_callback(follow)
        return following

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        self._has_user()
        super().add_done_callback(callback)

    def _has_user(self) -> None:
        self._check_process()
        self._look()
        if self.call is not None:
            self.call.has_callbacks = True

    def cancel(self) -> bool:
        """Give the call up: ``wait`` raises ``CallCancelled``.

        What has not begun over there is not begun any more; a coroutine is cancelled; a function that runs
        can find out by ``current_call().cancelled``.

        Returns:
            False if the answer was there already.
        """
        self._check_process()
        call = self.call
        if call is None or _done(self):
            return False
        outgoing = call.outgoing
        error = CallCancelled(f"{call.describe()} on {outgoing.peer!r} was cancelled")
        return bool(outgoing.cancel(call.number, error))

    def cancelled(self) -> bool:
        """Whether the call was given up with :meth:`cancel`."""
        return self.call is not None and isinstance(self.call.error, CallCancelled)

    def fail(self, error: BaseException) -> None:
        """Complete it with an error."""
        if not isinstance(error, Exception):
            # Not what ends a program: that would end the wrong one; torch's futures do not take it, either.
            error = RemoteError(type(error).__name__, str(error))
        # Their frames are ours, and hold this future.
        forget_frames(error)
        if not isinstance(error, CallCancelled):
            self._unseen = error
            if self._is_seen:
                self._unseen = None
        self.set_exception(error)  # type: ignore[arg-type]  # torch takes any exception, whatever it says

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def wake(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle)

        self.add_done_callback(wake)
        try:
            yield from done.__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._value()

    def __del__(self) -> None:
        if self._unseen is not None and not self.is_watched and self._process is forks.process:
            logger.warning("a call failed, and nobody has looked at its answer: %s", self._unseen)


register_reducer(RpcFuture, refuse_future)
