"""Interfaces between the parts of a worker, a few methods each.

Each part declares what it uses, instead of taking the whole agent. So it can be read and tested alone, and there are no
circular imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rallypoint.errors import RpcError

from .connections.calls import Call
from .connections.incoming import Incoming
from .connections.outgoing import Outgoing
from .current_call import CurrentCall
from .future import RpcFuture
from .worker_info import WorkerInfo


class Peers(Protocol):
    """The members of the group."""

    def info(self, to: Any = None) -> WorkerInfo:
        """Raises ``RpcError`` if there is no such worker."""

    def is_gone(self, worker: int) -> bool: ...


class Links(Protocol):
    """The connections to other workers."""

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left."""

    def is_connected_to(self, worker: int) -> bool: ...


class Tasks(Protocol):
    """Runs tasks on the worker's threads."""

    def soon(self, act: Callable[[], None]) -> None:
        """Safe in finalizers."""

    def later(self, seconds: float, act: Callable[[], None]) -> None: ...


class ControlCalls(Protocol):
    """Control messages of this package."""

    def call_control(
        self,
        to: int,
        kind: int,
        content: tuple[Any, ...],
        timeout: float,
        finish: Callable[[Call, Outgoing], None],
    ) -> None:
        """``finish`` gets the answer. Raises ``RpcError`` if the message cannot be sent."""

    def decode(self, call: Call, outgoing: Outgoing) -> Any:
        """The result of a completed call; raises the call's error."""


class Calls(Protocol):
    """Calls of functions on other workers."""

    def call_sync(
        self,
        to: Any,
        kind: int,
        what: Any,
        content: tuple[Any, ...],
        timeout: float,
        flags: int = 0,
    ) -> Any: ...

    def call_async(
        self,
        to: Any,
        kind: int,
        what: Any,
        content: tuple[Any, ...],
        timeout: float,
        flags: int = 0,
        finish: Callable[[Call, Outgoing], Any] | None = None,
        future: RpcFuture[Any] | None = None,
        lost: Callable[[RpcError], None] | None = None,
    ) -> RpcFuture[Any]: ...

    def decode(self, call: Call, outgoing: Outgoing) -> Any: ...

    def deadline(self, timeout: float) -> tuple[float | None, float]:
        """The deadline of a call that starts now, and its timeout in seconds."""


class Leavable(Protocol):
    """A request of a peer, which may stop waiting for the answer."""

    @property
    def call(self) -> CurrentCall: ...

    def give_up(self) -> None:
        """Send no answer: the caller has stopped waiting."""

    def on_cancel(self, act: Callable[[], None]) -> None:
        """Have ``act`` called when the caller cancels the call."""


class Answerable(Leavable, Protocol):
    """A request of a peer, to be answered once."""

    @property
    def incoming(self) -> Incoming: ...

    def answer(self, result: Any) -> None: ...

    def fail(self, error: BaseException, *, printed: bool = True) -> None: ...


class Streaming(Leavable, Protocol):
    """A request that is answered item by item."""

    # The context of distributed autograd; None outside any.
    context: Any

    def item(self, value: Any) -> None: ...

    def end_stream(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def flow(self, source: Any) -> None:
        """Have ``source.credit`` called when the caller grants credit."""
