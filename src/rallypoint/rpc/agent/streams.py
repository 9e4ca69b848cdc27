"""Streams: a call with many answers, one by one, no faster than the caller takes them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rallypoint._core import forks
from rallypoint.errors import RpcError, RpcTimeout
from rallypoint.rpc.agent_in_use import ELSEWHERE
from rallypoint.rpc.connections.calls import Call
from rallypoint.rpc.connections.messages import Kind
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.crew.crew import Crew
from rallypoint.rpc.current_call import SERVING
from rallypoint.rpc.interruptions import DUE, run_due
from rallypoint.wire.frames import Frame


if TYPE_CHECKING:
    from .serving import Request

T = TypeVar("T")

# Items that are sent ahead of the consumer.
WINDOW = 16
# How many they are travels among the keyword arguments, under a name that no function has.
WINDOW_NAME = " window"


class ItemSource:
    """The callee's end: runs a generator as far as the caller's credit goes."""

    def __init__(self, request: Request, window: int) -> None:
        self._request = request
        self._credit = window
        self._ready = threading.Condition()
        self._stopped = False
        request.flow(self)
        request.on_cancel(self.stop)

    def credit(self, amount: int) -> None:
        with self._ready:
            self._credit += amount
            self._ready.notify()

    def stop(self) -> None:
        with self._ready:
            self._stopped = True
            self._ready.notify()

    def abandon(self) -> None:
        """In a forked child."""
        self._ready = threading.Condition()
        self._stopped = True

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Make all items. Blocks its thread while the caller does not take them."""
        request = self._request
        token = SERVING.set(request.call)
        try:
            items = func(*args, **(kwargs or {}))
            if inspect.isasyncgen(items):
                items = _drive(items)
            elif not isinstance(items, Iterator):
                items = iter(items)
            try:
                for value in items:
                    if not self._take_credit():
                        # Not its end: the caller has given up, or finds its own time run out.
                        request.give_up()
                        break
                    request.item(value)
                else:
                    request.end_stream()
            finally:
                close = getattr(items, "close", None)
                if close is not None:
                    close()
        except BaseException as error:  # noqa: BLE001  # the caller is to be told
            request.fail(error)
        finally:
            SERVING.reset(token)

    def _take_credit(self) -> bool:
        """Wait until one more item may be sent; False if the caller has given up."""
        with self._ready:
            if not self._credit and not self._stopped:
                crew = Crew.current()
                left = self._request.call.time_left()
                if crew is None:
                    self._ready.wait_for(lambda: self._credit or self._stopped, left)
                else:
                    with crew.waiting():
                        self._ready.wait_for(lambda: self._credit or self._stopped, left)
            if self._stopped or not self._credit:
                return False
            self._credit -= 1
            return True


def _drive(items: AsyncIterator[Any]) -> Iterator[Any]:
    """An asynchronous generator's items, on this thread."""
    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(items))
            except StopAsyncIteration:
                return
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class ItemChannel(Generic[T]):
    """The caller's end: takes items as they come, and gives credit. The call holds it, the user a handle."""

    def __init__(self, decode: Callable[[Frame], T], window: int) -> None:
        self._decode = decode
        self._window = window
        self._items: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._call: Call | None = None
        self._outgoing: Outgoing | None = None
        self._taken = 0
        self._ended = False
        self._closed = False
        self._wake: Callable[[], None] | None = None

    def begun(self, call: Call, outgoing: Outgoing) -> None:
        self._call = call
        self._outgoing = outgoing

    # Called by whoever reads the connection.
    def on_item(self, frame: Frame) -> None:
        with self._changed:
            if self._closed:
                wanted = False
            else:
                wanted = True
                self._items.append(frame)
                self._changed.notify()
            wake = self._wake
        if not wanted:
            self._discard(frame)
        elif wake is not None:
            wake()

    def on_done(self, _: Call) -> None:
        with self._changed:
            self._changed.notify()
            wake = self._wake
        if wake is not None:
            wake()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        frame = self._take_now()
        if frame is None:
            crew = Crew.current()
            if crew is None:
                frame = self._wait()
            else:
                with crew.waiting():
                    frame = self._wait()
        return self._accept(frame)

    def _wait(self) -> Frame | None:
        if DUE:
            run_due()
        call = self._call
        assert call is not None
        with self._changed:
            left = None if call.deadline is None else max(0.0, call.deadline - time.monotonic())
            if not self._changed.wait_for(lambda: self._items or call.done, left):
                raise RpcTimeout(call.seconds, call.describe())
            return self._items.popleft() if self._items else None

    def _take_now(self) -> Frame | None:
        try:
            return self._items.popleft()
        except IndexError:
            return None

    def _accept(self, frame: Frame | None) -> T:
        if frame is not None:
            self._taken += 1
            if self._taken * 2 >= self._window:
                self._give_credit()
            return self._decode(frame)
        call = self._call
        assert call is not None
        if not self._ended:
            self._ended = True
            if call.error is not None:
                raise call.error
            if call.frame is not None and call.frame.kind != Kind.END:
                # A failure: decoding raises it.
                self._decode(call.frame)
        raise StopIteration

    def _give_credit(self) -> None:
        taken, self._taken = self._taken, 0
        call, outgoing = self._call, self._outgoing
        if call is not None and outgoing is not None and not call.done:
            outgoing.tell(Kind.CREDIT, call.number, taken.to_bytes(8, "little"))

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        frame = self._take_now()
        if frame is None:
            await self._wait_async()
            frame = self._take_now()
        try:
            return self._accept(frame)
        except StopIteration:
            raise StopAsyncIteration from None

    async def _wait_async(self) -> None:
        call = self._call
        assert call is not None
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            if self._items or call.done:
                return
            self._wake = wake
        try:
            left = None if call.deadline is None else max(0.0, call.deadline - time.monotonic())
            await asyncio.wait_for(event.wait(), left)
        except TimeoutError:
            raise RpcTimeout(call.seconds, call.describe()) from None
        finally:
            self._wake = None

    def close(self) -> None:
        """Take no more: the generator over there is closed. A second call does nothing."""
        call, outgoing = self._call, self._outgoing
        self._ended = True
        if call is not None and outgoing is not None and not call.done:
            outgoing.cancel(call.number, StopIteration())
        with self._changed:
            self._closed = True
            left = list(self._items)
            self._items.clear()
        for frame in left:
            self._discard(frame)

    def _discard(self, frame: Frame) -> None:
        if self._outgoing is not None:
            self._outgoing.discard(frame)


class RpcStream(Generic[T]):
    """What ``rpc_stream`` returns: an iterator over what the generator over there yields, and an asynchronous one.

    Leave it early with :meth:`close`, at the end of a ``with`` block, or by dropping it: the generator is closed, too.
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
        """Take no more. A second call does nothing."""
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
        # A collection may run anywhere, also where locks are held that closing takes.
        self._soon(self.close)
