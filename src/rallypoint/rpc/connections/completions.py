"""Calls whose replies have come while nobody waits for them: what hangs on them is done by the pool."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from rallypoint.rpc.threads.thread_pool import Job

from .calls import Call
from .outgoing import Outgoing


logger = logging.getLogger(__name__)


def complete_by(finish: Callable[[Call, Outgoing], Any], call: Call) -> None:
    """Complete a call's future with what ``finish`` makes out of the reply."""
    future, call.future = call.future, None
    try:
        value = finish(call, call.outgoing)
    except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
        future.fail(error)
    else:
        future.set_result(value)


def complete_soon(calls: list[Call], jobs: deque[Job]) -> None:
    """User code hangs on some of them, which may take long: those are jobs of their own."""
    short = [each for each in calls if not each.has_callbacks]
    if short:
        jobs.append(Completions(short, jobs))
    if len(short) < len(calls):
        jobs.extend(Completion(each) for each in calls if each.has_callbacks)


class Completions:
    """Calls whose replies have come together, and on which nothing of the user's hangs."""

    __slots__ = ("_calls", "_jobs")

    def __init__(self, calls: list[Call], jobs: deque[Job]) -> None:
        self._calls = deque(calls)
        self._jobs = jobs

    def run(self) -> None:
        if not self._calls:
            return
        # Something of the user's may be hung on one of them at this moment, and wait for a later one: whoever leads
        # then goes on with the rest.
        self._jobs.append(self)
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:
                return
            Completion(call).run()


class Completion:
    """A call whose reply has come: what hangs on it is done by the pool."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def run(self) -> None:
        done = self._call.on_done
        if done is not None:
            try:
                done(self._call)
            except BaseException:
                logger.exception("a callback of a call failed")
