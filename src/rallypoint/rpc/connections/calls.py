"""Calls that are under way to one peer: who waits for which, and until when.

A call is made once and completed once, by whichever thread reads its reply, notices the loss of the peer, or finds
its time run out. Completion is the pop from the table: whoever gets the call out of it completes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.rpc.references.ids import Fork
from rallypoint.wire.frames import Frame


class Call:
    """One request without an answer yet.

    Attributes:
        frame: the reply, once it has come.
        error: why there will be none.
        deadline: monotonic seconds, or None.
        waiter: held while a thread sleeps until it is released.
        on_done: called once, with the call, instead of waking anybody; for futures.
        on_item: called with each frame of a stream.
        future: what ``on_done`` completes, and ``outgoing``: the connection; kept here, since a closure for each
            call would be more for the garbage collector to look at than the call itself.
        has_callbacks: whether ``on_done`` runs code of the user's, which may take long.
        held: kept until the answer comes, as the buffers that were sent.
        size: bytes that count as in flight.
        forks: references that were sent with it.
        is_owed: whether it was sent, and the peer still has to say something about it.
    """

    __slots__ = (
        "deadline",
        "done",
        "error",
        "forks",
        "frame",
        "future",
        "has_callbacks",
        "held",
        "is_owed",
        "kind",
        "number",
        "on_done",
        "on_item",
        "outgoing",
        "seconds",
        "size",
        "waiter",
        "what",
    )

    def __init__(
        self,
        what: Any,
        deadline: float | None,
        seconds: float,
        on_done: Callable[[Call], None] | None = None,
    ) -> None:
        self.what = what
        self.deadline = deadline
        self.seconds = seconds
        self.on_done = on_done
        self.on_item: Callable[[Frame], None] | None = None
        self.frame: Frame | None = None
        self.error: BaseException | None = None
        self.done = False
        self.waiter: threading.Lock | None = None
        self.held: Any = None
        self.size = 0
        self.forks: Sequence[Fork] = ()
        self.kind = 0
        self.number = 0
        self.future: Any = None
        self.outgoing: Any = None
        self.has_callbacks = False
        self.is_owed = False

    def describe(self) -> str:
        """The call, for an error."""
        return describe(self.what)


def describe(what: Any) -> str:
    if isinstance(what, str):
        return what
    module = getattr(what, "__module__", None)
    name = getattr(what, "__qualname__", None) or repr(what)[:100]
    return f"{module}.{name}" if module else name


class CallTable:
    """Calls by number. Safe to use from several threads: each operation is one dict operation."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}

    def add(self, number: int, call: Call) -> None:
        self._calls[number] = call

    def take(self, number: int) -> Call | None:
        """The call, for the caller to complete; None if somebody else has it."""
        return self._calls.pop(number, None)

    def get(self, number: int) -> Call | None:
        return self._calls.get(number)

    def all(self) -> list[Call]:
        return list(self._calls.values())

    def __len__(self) -> int:
        return len(self._calls)

    def __bool__(self) -> bool:
        return bool(self._calls)

    def take_all(self) -> list[Call]:
        """All of them: the peer is lost."""
        taken = []
        while self._calls:
            try:
                taken.append(self._calls.popitem()[1])
            except KeyError:
                break
        return taken

    def take_expired(self, now: float) -> tuple[list[tuple[int, Call]], float | None]:
        """Those whose time is up, and when the next one's is."""
        expired, following = [], None
        for number, call in list(self._calls.items()):
            deadline = call.deadline
            if deadline is None:
                continue
            if deadline <= now:
                taken = self._calls.pop(number, None)
                if taken is not None:
                    expired.append((number, taken))
            elif following is None or deadline < following:
                following = deadline
        return expired, following
