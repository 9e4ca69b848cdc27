"""The calls in progress to one peer.

A call is completed once: by the thread that reads its reply, notices the loss of the peer, or finds it timed out.
Popping the call from the table decides which: the thread that gets it completes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.rpc.references.ids import Fork
from rallypoint.wire.frames import Frame


class Call:
    """A request and its outcome.

    Attributes:
        frame: the reply, once it has arrived.
        error: why there will be no reply.
        deadline: monotonic seconds, or None.
        waiter: a lock that a sleeping thread waits for.
        on_done: for futures: called once with the call, instead of waking a thread.
        on_item: called with each frame of a stream.
        future, outgoing: what ``on_done`` completes, and the connection. Attributes, because a closure per call would
            cost the garbage collector more than the call itself.
        has_callbacks: whether ``on_done`` runs user code, which may be slow.
        held: what to keep alive until the answer arrives, such as the buffers that were sent.
        size: bytes counted as in flight.
        forks: references that were sent with it.
        is_owed: whether it was sent and the peer has not answered it yet.
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
        """The call, as errors name it."""
        return describe(self.what)


def describe(what: Any) -> str:
    if isinstance(what, str):
        return what
    module = getattr(what, "__module__", None)
    name = getattr(what, "__qualname__", None) or repr(what)[:100]
    return f"{module}.{name}" if module else name


class CallTable:
    """Calls by number. Thread-safe: each operation is a single dict operation."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}

    def add(self, number: int, call: Call) -> None:
        self._calls[number] = call

    def take(self, number: int) -> Call | None:
        """The call, for the caller to complete; None if another thread has taken it."""
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
        """All calls, for the caller to fail: the peer is lost."""
        taken = []
        while self._calls:
            try:
                taken.append(self._calls.popitem()[1])
            except KeyError:
                break
        return taken

    def take_expired(self, now: float) -> tuple[list[tuple[int, Call]], float | None]:
        """The calls that have timed out, and the next deadline."""
        expired, following = [], None
        # Not list(items()): each of its tuples may trigger a collection, in which other threads may change the dict.
        for number, call in self._calls.copy().items():
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
