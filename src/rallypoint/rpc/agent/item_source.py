"""The callee's end of a stream: runs a generator as far as the caller's credit allows."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from rallypoint.rpc.autograd.context import CURRENT
from rallypoint.rpc.connections.calls import describe
from rallypoint.rpc.current_call import SERVING
from rallypoint.rpc.ports import Streaming
from rallypoint.rpc.stream import single_result
from rallypoint.rpc.threads.thread_pool import ThreadPool


logger = logging.getLogger(__name__)


class ItemSource:
    """Produces the items of one stream."""

    def __init__(self, request: Streaming, window: int) -> None:
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
        """Produce all items. Blocks while the caller has granted no credit."""
        request = self._request
        is_answered = False
        token, entered = SERVING.set(request.call), CURRENT.set(request.context)
        try:
            items = _items_of(func, func(*args, **(kwargs or {})))
            try:
                for value in items:
                    if not self._take_credit():
                        # Cancelled or timed out, which the caller finds by itself.
                        request.give_up()
                        is_answered = True
                        break
                    request.item(value)
                else:
                    request.end_stream()
                    is_answered = True
            finally:
                close = getattr(items, "close", None)
                if close is not None:
                    close()
        except BaseException as error:
            if is_answered:
                # It was cleaning up.
                logger.exception(
                    "%s failed while it was closed; its caller, %r, has left the stream and does not see the error",
                    describe(func),
                    request.call.caller.name,
                )
            else:
                request.fail(error)
        finally:
            CURRENT.reset(entered)
            SERVING.reset(token)

    def _take_credit(self) -> bool:
        """Wait until one more item may be sent; False if the stream was cancelled or has timed out."""
        with self._ready:
            if not self._credit and not self._stopped:
                pool = ThreadPool.current()
                left = self._request.call.time_left()
                if pool is None:
                    self._ready.wait_for(lambda: self._credit or self._stopped, left)
                else:
                    with pool.waiting():
                        self._ready.wait_for(lambda: self._credit or self._stopped, left)
            if self._stopped or not self._credit:
                return False
            self._credit -= 1
            return True


def _items_of(func: Any, returned: Any) -> Iterator[Any]:
    if inspect.isasyncgen(returned):
        return _drive(returned)
    if inspect.iscoroutine(returned):
        # A coroutine function in a wrapper, which the caller could not tell.
        returned.close()
        raise single_result(func)
    return returned if isinstance(returned, Iterator) else iter(returned)


def _drive(items: AsyncGenerator[Any, Any]) -> Iterator[Any]:
    """An asynchronous generator's items, on this thread."""
    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(items))
            except StopAsyncIteration:
                return
    finally:
        try:
            loop.run_until_complete(items.aclose())
        finally:
            # Those that it has left open itself.
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
