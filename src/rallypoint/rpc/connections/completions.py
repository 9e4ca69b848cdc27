"""Completing calls that no thread waits for: the pool completes their futures and runs the callbacks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from rallypoint.rpc.threads.thread_pool import Answer, Job

from .calls import Call
from .outgoing import Outgoing


logger = logging.getLogger(__name__)


def complete_by(finish: Callable[[Call, Outgoing], Any], call: Call) -> None:
    """Complete a call's future with what ``finish`` makes of the reply."""
    future, call.future = call.future, None
    try:
        value = finish(call, call.outgoing)
    except BaseException as error:  # noqa: BLE001  # raised where the future is waited for
        future.fail(error)
    else:
        future.complete(value)


def complete_soon(calls: list[Call], jobs: deque[Job]) -> None:
    """Calls with callbacks become jobs of their own: user code may be slow."""
    short: list[Call] = []
    slow: list[Completion] = []
    for call in calls:
        # Read once: the user may add a callback at this moment.
        if call.has_callbacks:
            slow.append(Completion(call))
        else:
            short.append(call)
    if short:
        jobs.append(Completions(short, jobs))
    jobs.extend(slow)


class Completions(Answer):
    """Calls without callbacks whose replies arrived together."""

    __slots__ = ("_calls", "_jobs")

    def __init__(self, calls: list[Call], jobs: deque[Job]) -> None:
        self._calls = deque(calls)
        self._jobs = jobs

    def run(self) -> None:
        if not self._calls:
            return
        # The user may now add to one of them a callback that waits for a later one. Then the next leader completes
        # the rest.
        self._jobs.append(self)
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:
                return
            Completion(call).run()


class Completion(Answer):
    """A call whose reply has arrived."""

    __slots__ = ("_call",)
    # It runs user code.
    may_wait = True

    def __init__(self, call: Call) -> None:
        self._call = call

    def run(self) -> None:
        done = self._call.on_done
        if done is not None:
            try:
                done(self._call)
            except BaseException:
                logger.exception("a callback of a call failed")
