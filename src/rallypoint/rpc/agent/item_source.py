"""The callee's end of a stream: runs a generator as far as the caller's credit allows."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from rallypoint.errors import CallCancelled
from rallypoint.rpc.connections.calls import describe
from rallypoint.rpc.current_call import SERVING
from rallypoint.rpc.current_context import CURRENT
from rallypoint.rpc.ports import Streaming
from rallypoint.rpc.stream import single_result
from rallypoint.rpc.threads.thread_pool import ThreadPool

from .coroutine_loop import CoroutineLoop


logger = logging.getLogger(__name__)


class ItemSource:
    """Produces the items of one stream: on the calling thread, or as one task of the loop if the generator is asynchronous.

    Args:
        window: how many items may be sent before the caller grants credit.
        loop: runs asynchronous generators.
    """

    def __init__(self, request: Streaming, window: int, loop: CoroutineLoop) -> None:
        self._request = request
        self._loop = loop
        self._credit = window
        self._ready = threading.Condition()
        self._stopped = False
        # Set for a task that waits for credit.
        self._waiter: asyncio.Event | None = None
        request.flow(self)
        request.on_cancel(self.stop)

    def credit(self, amount: int) -> None:
        with self._ready:
            self._credit += amount
            self._ready.notify()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._loop.wake(waiter)

    def stop(self) -> None:
        with self._ready:
            self._stopped = True
            self._ready.notify()

    def abandon(self) -> None:
        """In a forked child."""
        self._ready = threading.Condition()
        self._stopped = True

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Produce all items. Blocks while the caller has granted no credit, unless the generator is asynchronous."""
        request = self._request
        is_answered = False
        token, entered = SERVING.set(request.call), CURRENT.set(request.context)
        try:
            returned = func(*args, **(kwargs or {}))
            if inspect.isasyncgen(returned):
                self._run_later(func, returned)
                return
            items = _items_of(func, returned)
            try:
                for value in items:
                    if not self._take_credit():
                        # Cancelled or timed out, which the caller notices on its own.
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
        except BaseException as error:  # noqa: BLE001  # sent to the caller, or logged
            if is_answered:
                self._log(func, error)
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

    def _log(self, func: Any, error: BaseException) -> None:
        """Log an error that the generator raised while cleaning up."""
        logger.error(
            "%s failed while it was closed; its caller, %r, has left the stream and does not see the error",
            describe(func),
            self._request.call.caller.name,
            exc_info=error,
        )

    # -- asynchronous generators ---------------------------------------------------------------------

    def _run_later(self, func: Any, items: AsyncGenerator[Any, Any]) -> None:
        request = self._request

        def leave() -> None:
            self.stop()
            request.give_up()

        def finish(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                if not self._stopped:
                    request.fail(CallCancelled("the generator was cancelled"))
                return
            error = task.exception()
            if error is None:
                if not self._stopped:
                    request.end_stream()
            elif self._stopped:
                self._log(func, error)
            else:
                request.fail(error)

        self._loop.begin(request, self._send_all(items), finish, leave)

    async def _send_all(self, items: AsyncGenerator[Any, Any]) -> None:
        """Produce all items, in one task: tokens of context variables and ``asyncio.timeout`` require that."""
        try:
            step = anext(items)
            while True:
                try:
                    value = await step
                except StopAsyncIteration:
                    return
                cut: asyncio.CancelledError | None = None
                try:
                    await self._wait_for_credit()
                except asyncio.CancelledError as error:
                    cut = error
                if self._stopped:
                    return
                self._request.item(value)
                # A cancellation that cuts the wait short is raised at the yield: a time limit around it expects that.
                step = anext(items) if cut is None else items.athrow(cut)
        finally:
            await items.aclose()

    async def _wait_for_credit(self) -> None:
        while not self._stopped:
            with self._ready:
                if self._credit:
                    self._credit -= 1
                    return
                waiter = self._waiter = asyncio.Event()
            await waiter.wait()


def _items_of(func: Any, returned: Any) -> Iterator[Any]:
    if inspect.iscoroutine(returned):
        # A coroutine function in a wrapper, which the caller could not recognize.
        returned.close()
        raise single_result(func)
    return returned if isinstance(returned, Iterator) else iter(returned)
