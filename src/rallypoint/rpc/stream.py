"""The caller's end of a stream: a call with many answers, sent no faster than the caller reads them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from rallypoint._core import forks
from rallypoint.errors import RpcError, RpcTimeout
from rallypoint.wire.frames import Frame

from .connections.calls import Call, describe
from .connections.messages import Kind
from .connections.outgoing import Outgoing
from .current_agent import ELSEWHERE
from .future import again
from .interruptions import DUE, run_due
from .threads.thread_pool import ThreadPool


T = TypeVar("T")

# Items that may be sent ahead of the consumer.
WINDOW = 16
# The keyword under which the window is sent. No parameter can have this name.
WINDOW_NAME = " window"


def single_result(func: Any) -> TypeError:
    """The error for a ``func`` that has one result, not items."""
    return TypeError(
        f"rpc_stream was given {describe(func)}, a coroutine function, which has one result: expected a generator function"
        " (def or async def, with yield); rpc_sync and rpc_async call a coroutine function"
    )


# No item is left, and none will follow.
_END: Final = object()


class ItemChannel(Generic[T]):
    """Receives items and grants credit. The call refers to the channel; the user holds an :class:`RpcStream`.

    Several threads and tasks may take items: each item goes to one of them, and the end or the error to all.
    """

    def __init__(self, decode: Callable[[Frame], T], window: int) -> None:
        self._decode = decode
        self._window = window
        self._items: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._call: Call | None = None
        self._outgoing: Outgoing | None = None
        self._taken = 0
        # Whether close() was called, and whether it has emptied the items.
        self._is_left = False
        self._closed = False
        # The threads and tasks that have seen the error that ended the stream.
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        # One for each waiting task.
        self._wakers: list[Callable[[], None]] = []

    def begun(self, call: Call, outgoing: Outgoing) -> None:
        self._call = call
        self._outgoing = outgoing

    # Called by the thread that reads the connection.
    def on_item(self, frame: Frame) -> None:
        with self._changed:
            if self._closed:
                wanted = False
            else:
                wanted = True
                self._items.append(frame)
                self._changed.notify()
            wakers = tuple(self._wakers)
        if not wanted:
            self._discard(frame)
            return
        for wake in wakers:
            wake()

    def on_done(self, call: Call) -> None:
        # The channel refers to the call: the cycle would last until the next garbage collection.
        call.on_item = call.on_done = None
        with self._changed:
            self._changed.notify_all()
            wakers = tuple(self._wakers)
        for wake in wakers:
            wake()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        found = self._poll()
        if found is None:
            pool = ThreadPool.current()
            if pool is None:
                found = self._wait()
            else:
                with pool.waiting():
                    found = self._wait()
        try:
            return self._accept(found, threading.current_thread)
        finally:
            if DUE:
                run_due()

    def _poll(self) -> Any:
        """The next item's frame; ``_END``; or None if the caller must wait. Takes no lock."""
        call = self._call
        assert call is not None
        # In this order: the last item comes before the end.
        is_over = call.done or self._closed
        try:
            return self._items.popleft()
        except IndexError:
            return _END if is_over else None

    def _wait(self) -> Any:
        if DUE:
            run_due()
        call = self._call
        assert call is not None
        with self._changed:
            left = None if call.deadline is None else max(0.0, call.deadline - time.monotonic())
            found = self._changed.wait_for(self._poll, left)
        if found is None:
            raise RpcTimeout(call.seconds, call.describe())
        return found

    def _accept(self, found: Any, reader: Callable[[], Any]) -> T:
        if found is not _END:
            self._give_credit()
            return self._decode(found)
        call = self._call
        assert call is not None
        if not self._is_left and self._is_news(reader()):
            if call.error is not None:
                raise again(call.error)
            if call.frame is not None and call.frame.kind != Kind.END:
                # A failure: decoding raises it.
                self._decode(call.frame)
        raise StopIteration

    def _is_news(self, reader: Any) -> bool:
        """Whether this thread or task has yet to see the stream's error. To one that has, the stream is empty."""
        with self._changed:
            is_news = reader not in self._told
            self._told.add(reader)
        return is_news

    def _give_credit(self) -> None:
        """Count an item that was taken, and grant credit once that makes half a window."""
        with self._changed:
            self._taken += 1
            if self._taken * 2 < self._window:
                return
            taken, self._taken = self._taken, 0
        call, outgoing = self._call, self._outgoing
        if call is not None and outgoing is not None and not call.done:
            outgoing.tell(Kind.CREDIT, call.number, taken.to_bytes(8, "little"))

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while (found := self._poll()) is None:
            # Another reader may take the item that arrives.
            await self._wait_async()
        try:
            return self._accept(found, asyncio.current_task)
        except StopIteration:
            raise StopAsyncIteration from None

    async def _wait_async(self) -> None:
        call = self._call
        assert call is not None
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            if self._items or call.done or self._closed:
                return
            self._wakers.append(wake)
        try:
            left = None if call.deadline is None else max(0.0, call.deadline - time.monotonic())
            await asyncio.wait_for(event.wait(), left)
        except TimeoutError:
            raise RpcTimeout(call.seconds, call.describe()) from None
        finally:
            with self._changed:
                self._wakers.remove(wake)

    def close(self) -> None:
        """Stop, and close the generator. Idempotent."""
        call, outgoing = self._call, self._outgoing
        self._is_left = True
        if call is not None and outgoing is not None and not call.done:
            outgoing.cancel(call.number, StopIteration())
        with self._changed:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            wakers = tuple(self._wakers)
        for wake in wakers:
            wake()
        for frame in left:
            self._discard(frame)

    def _discard(self, frame: Frame) -> None:
        if self._outgoing is not None:
            self._outgoing.discard(frame)


class RpcStream(Generic[T]):
    """An iterator over the items of a generator on another worker; also asynchronous. Returned by ``rpc_stream``.

    To stop early, call :meth:`close`, leave a ``with`` block, or drop the stream. The generator is then closed as well.

    Args:
        channel: receives the items.
        soon: runs a function on another thread.
    """

    def __init__(self, channel: ItemChannel[T], soon: Callable[[Callable[[], None]], None]) -> None:
        self._channel = channel
        self._soon = soon
        self._process = forks.process

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self._check_process()
        return next(self._channel)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        self._check_process()
        return await anext(self._channel)

    def close(self) -> None:
        """Stop, and close the generator. Does not block. Idempotent."""
        if self._process is forks.process:
            self._channel.close()

    def _check_process(self) -> None:
        if self._process is not forks.process:
            raise RpcError(f"a stream cannot be read in a forked child: {ELSEWHERE}")

    def __enter__(self) -> RpcStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Garbage collection may run while locks are held that closing takes.
        self._soon(self.close)
