"""The event loop for ``async def`` functions and generators that peers call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from rallypoint.errors import CallCancelled
from rallypoint.rpc.ports import Answerable, Leavable

from .torch_modes import task_factory


logger = logging.getLogger(__name__)

# Seconds for tasks that clean up when the loop closes.
_LAST_WORDS = 0.5


class CoroutineLoop:
    """An event loop in a thread of its own, which is started for the first coroutine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, request: Answerable, coroutine: Any) -> None:
        """Run a coroutine, and answer when it is done."""

        def finish(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                request.fail(CallCancelled("the coroutine was cancelled"))
                return
            error = task.exception()
            if error is not None:
                request.fail(error)
            else:
                request.answer(task.result())

        self.begin(request, coroutine, finish)

    def begin(
        self,
        request: Leavable,
        coroutine: Any,
        finish: Callable[[asyncio.Task[Any]], None],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a coroutine as a task, which is cancelled with the call and at its deadline.

        Args:
            finish: called with the task when it is done.
            leave: called before the task is cancelled.
        """
        loop = self._start()
        context = copy_context()

        def begin() -> None:
            task = loop.create_task(coroutine, context=context)
            self._count += 1
            deadline = request.call.deadline
            is_stopped = False

            def stop() -> None:
                # Only once: it may be cancelled shortly before its deadline, and a second time would cut its cleanup short.
                nonlocal is_stopped
                if not is_stopped:
                    is_stopped = True
                    leave()
                    task.cancel()

            if deadline is not None:

                def expire() -> None:
                    # No answer: the caller raises its own timeout.
                    request.give_up()
                    stop()

                alarm = loop.call_later(max(0.0, deadline - time.monotonic()), expire)
                task.add_done_callback(lambda _: alarm.cancel())

            def cancel() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(stop)

            request.on_cancel(cancel)
            task.add_done_callback(done)

        def done(task: asyncio.Task[Any]) -> None:
            self._count -= 1
            finish(task)

        loop.call_soon_threadsafe(begin)

    def wake(self, waiter: asyncio.Event) -> None:
        """Set an event that a task waits for, from another thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(waiter.set)

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                loop.set_task_factory(task_factory)
                self._thread = threading.Thread(
                    target=_run, args=(loop,), name=f"{self._name}-asyncio", daemon=True
                )
                self._thread.start()
            return self._loop

    def count(self) -> int:
        """The number of running coroutines."""
        return self._count

    def close(self, timeout: float) -> None:
        """Cancel the coroutines, and stop the thread."""
        with self._lock:
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is None or thread is None:
            return

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                # Tasks that were cancelled before are cleaning up, which another cancellation would cut short.
                if not task.cancelling():
                    task.cancel()
            if tasks:
                _, left = await asyncio.wait(tasks, timeout=_LAST_WORDS)
                for task in left:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            # Close the generators that coroutines have left open.
            await loop.shutdown_asyncgens()
            loop.stop()

        loop.call_soon_threadsafe(lambda: loop.create_task(cancel_all()))
        thread.join(timeout)
        if not thread.is_alive():
            loop.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, whatever its tasks raise.

    asyncio keeps a SystemExit or KeyboardInterrupt as the task's result, and then lets it end the loop as well, which
    would leave all later coroutines without an answer.
    """
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            logger.info("a coroutine raised %r, which ends no worker", error)
        else:
            return
