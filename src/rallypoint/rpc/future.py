"""The future of a call: torch's Future, which can also be awaited and cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from torch.futures import Future

from rallypoint._core import forks, raised
from rallypoint.errors import CallCancelled, RallyError, RemoteError, RpcError
from rallypoint.wire.remote_error import message_of

from .connections.calls import Call
from .current_agent import ELSEWHERE
from .current_context import CURRENT, within
from .interruptions import DUE, Lent, Rest, run_due
from .serialization.payload import refuse_future, register_reducer
from .threads.thread_pool import ThreadPool, waiting
from .torch_private import NativeFuture, fail_future


logger = logging.getLogger(__name__)

_NO_DEVICES: list[Any] = []
_init = NativeFuture.__init__
_wait = NativeFuture.wait
_done = NativeFuture.done
_set_result = NativeFuture.set_result
_call_back = NativeFuture.add_done_callback

T = TypeVar("T")
S = TypeVar("S")


def copy_of(error: BaseException) -> BaseException:
    """A copy of an exception without its frames, to be raised elsewhere; the exception itself if it cannot be copied."""
    kind = type(error)
    try:
        made: BaseException = copy.copy(error)
        if type(made) is not kind or message_of(made) != message_of(error):
            raise TypeError
    except Exception:  # noqa: BLE001  # its constructor takes other arguments
        try:
            made = kind.__new__(kind, *error.args)
            raised.set_args(made, error.args)
            vars(made).update(vars(error))
        except Exception:  # noqa: BLE001  # better a leak than another error
            return error
    raised.set_cause(made, error.__cause__, suppress=error.__suppress_context__)
    return made


def _in_context(context: Any, callback: Callable[[Any], None]) -> Callable[[Any], None]:
    """Have a callback run in a context, wherever the answer is read: gradients flow through the calls that it makes, too."""

    def call_back(done: Any) -> None:
        with within(context):
            callback(done)

    return call_back


def again(error: BaseException) -> BaseException:
    """A copy of a future's exception, to be raised in its place.

    A raised exception refers to the frames it passes through, and these refer to the future. torch's futures are C++
    objects, so the garbage collector would not find this cycle, and it would leak. The exception also refers to the one
    that was being handled where it was raised, and so to that one's frames.
    """
    made = copy_of(error)
    if made is not error:
        raised.set_traceback(error, None)
        raised.forget_context(error)
    return made


def _failed(done: Future[Any]) -> bool:
    try:
        Future.value(done)
    except BaseException as error:  # noqa: BLE001
        raised.forget_frames(error)  # the future keeps it, and it would keep this frame
        return True
    return False


def _of_callback(error: BaseException) -> BaseException:
    """A callback's error as torch's futures raise it, unless its type is informative."""
    if isinstance(error, RuntimeError | RallyError) or not isinstance(error, Exception):
        return error
    mistake = RuntimeError(
        f"Got the following error when running the callback: {type(error).__name__}: {message_of(error)}"
    )
    mistake.__cause__ = error
    return mistake


class RpcFuture(Future[T]):
    """The future that ``rpc_async`` returns.

    It is a ``torch.futures.Future`` that can also be awaited in asyncio and cancelled (:meth:`cancel`). It logs a failure
    that is never looked at.
    """

    # No __dict__: one object fewer per call for the garbage collector.
    __slots__ = ("_is_seen", "_process", "_unseen", "call", "is_watched")

    def __init__(self) -> None:
        # Bypasses torch's Python constructor, which only converts devices.
        _init(self, _NO_DEVICES)
        self._process = forks.process
        # None if the call could not be sent.
        self.call: Call | None = None
        self._unseen: BaseException | None = None
        self._is_seen = False
        # Whether failures are reported elsewhere.
        self.is_watched = False

    def wait(self) -> T:
        """Wait for the answer.

        Raises:
            Exception: what the function raised, or why there is no answer.
            RpcError: the parent process made the call, and forked this one before the answer arrived.
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
        try:
            return self._value()
        finally:
            if DUE:
                run_due()

    def _sleep(self) -> None:
        """Sleep until the future is complete. Unlike torch's wait, this can be interrupted by signals."""
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
        """Whether ``wait`` would return or raise at once."""
        return _done(self) or self._process is not forks.process

    def _check_process(self) -> None:
        if self._process is not forks.process and not _done(self):
            raise RpcError(
                f"this future belongs to the parent process and never completes in a forked child: {ELSEWHERE}"
            )

    def _look(self) -> None:
        """Record that the answer has been looked at, or will be."""
        # In this order: fail() may run in between, and checks _is_seen.
        self._is_seen = True
        self._unseen = None

    def _value(self) -> T:
        self._look()
        try:
            value: T = _wait(self)
        except BaseException as error:  # noqa: BLE001  # a copy of it is raised
            copied = again(error)
        else:
            return value
        try:
            raise copied
        finally:
            del copied  # it refers to this frame

    def value(self) -> T:
        self._check_process()
        self._look()
        try:
            return super().value()
        except BaseException as error:  # noqa: BLE001  # a copy of it is raised
            copied = again(error)
        try:
            raise copied
        finally:
            del copied  # it refers to this frame

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future of the result of ``callback(self)``.

        If the callback raises, ``wait`` raises this future's own error, a RuntimeError or a RallyError unchanged, and any
        other error as the cause of a RuntimeError, as torch's futures do.

        Raises:
            TypeError: ``callback`` cannot be called.
        """
        if not callable(callback):
            # torch's words.
            raise TypeError(
                "then(): incompatible function arguments. Expected a function of one future, got"
                f" {callback!r}"
            )
        following: RpcFuture[S] = RpcFuture()

        def follow(done: Future[T]) -> None:
            try:
                result = callback(done)
            except BaseException as error:  # noqa: BLE001  # raised where the result is waited for
                following.fail(error if _failed(done) else _of_callback(error))
            else:
                following.set_result(result)

        self.add_done_callback(follow)
        return following

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        self._has_user()
        if (context := CURRENT.get()) is not None:
            callback = _in_context(context, callback)
        super().add_done_callback(callback)

    def _has_user(self) -> None:
        self._check_process()
        self._look()
        if self.call is not None:
            self.call.has_callbacks = True

    def cancel(self) -> bool:
        """Cancel the call: ``wait`` raises ``CallCancelled``.

        If the function has not started, it never does. A running coroutine is cancelled; a running function can check
        ``current_call().cancelled``.

        Returns:
            False if the answer had already arrived.
        """
        self._check_process()
        call = self.call
        if call is None or _done(self):
            return False
        outgoing = call.outgoing
        error = CallCancelled(f"{call.describe()} on {outgoing.peer!r} was cancelled")
        return bool(outgoing.cancel(call.number, error))

    def cancelled(self) -> bool:
        """Whether the call was cancelled with :meth:`cancel`."""
        return self.call is not None and isinstance(self.call.error, CallCancelled)

    def set_result(self, result: T) -> None:
        """Complete a future that belongs to no call.

        Raises:
            RpcError: it is the future of a call, which the call's answer completes.
        """
        self._refuse_result("set_result")
        super().set_result(result)

    def set_exception(self, result: Any) -> None:
        """Complete a future that belongs to no call, with an error. Raises as :meth:`set_result`."""
        self._refuse_result("set_exception")
        super().set_exception(result)

    def _refuse_result(self, method: str) -> None:
        if self.call is not None:
            raise RpcError(
                # torch's words come first.
                f"Future can only be marked completed once: {method}() was called on the future of a call ({self.call.describe()} on"
                f" {self.call.outgoing.peer!r}), which the call's answer completes: use cancel() to wait no longer, or a"
                " torch.futures.Future() of your own for another result"
            )

    def complete(self, value: Any) -> None:
        """Complete the future with its call's answer."""
        _set_result(self, value)

    def fail(self, error: BaseException) -> None:
        """Complete the future with an error."""
        if not isinstance(error, Exception):
            # SystemExit and the like would end the wrong program, and torch's futures reject them.
            error = RemoteError(type(error).__name__, message_of(error))
        # The frames refer to this future.
        raised.forget_frames(error)
        if not isinstance(error, CallCancelled):
            self._unseen = error
            if self._is_seen:
                self._unseen = None
        fail_future(self, error)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def wake(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
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
            logger.warning("a call failed, and its error was never looked at: %s", self._unseen)


register_reducer(RpcFuture, refuse_future)
