"""Makes calls that are traced: each is a span, and tells the callee its place in the trace."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch.futures import Future

from rallypoint._core import raised
from rallypoint.rpc.connections.calls import Call, describe
from rallypoint.rpc.connections.messages import (
    CALL,
    FETCH,
    FLAG_TRACED,
    SCRIPT_CALL,
    SCRIPT_FETCH,
    STREAM,
)
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.serialization.tensor_writer import TensorWriter
from rallypoint.rpc.stream import RpcStream
from rallypoint.rpc.torch_private import NativeFuture
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.tracing import switch

from .caller import Caller
from .counters import is_own


if TYPE_CHECKING:
    from opentelemetry.trace import Span

# Requests whose content is a function and its arguments. Requests for remote values contain one of these.
_FUNCTIONS = (CALL, SCRIPT_CALL, STREAM)
# What rpc spans have in common (OpenTelemetry's semantic conventions for RPC).
SYSTEM = {"rpc.system.name": "rallypoint"}
# The name of a span that waits for a remote value.
TO_HERE = "RRef.to_here"

# The span of the call that this thread is about to send.
_SENDING: ContextVar[Span | None] = ContextVar("rally_span_of_call", default=None)


class TracedCaller(Caller):
    """Makes the calls of an agent whose process traces (:mod:`rallypoint.tracing`)."""

    def __init__(self, *parts: Any) -> None:
        # Not at the top: most processes do without OpenTelemetry.
        from rallypoint.tracing import spans

        super().__init__(*parts)
        self._spans = spans

    # The base class does the rest of each call.

    def call_sync(self, to: Any, kind: int, what: Any, *rest: Any, **more: Any) -> Any:
        with _Sending(span := self._begin_span(to, kind, what)):
            result = super().call_sync(to, kind, what, *rest, **more)
        if span is not None:
            span.end()
        return result

    def call_async(self, to: Any, kind: int, what: Any, *rest: Any, **more: Any) -> RpcFuture[Any]:
        with _Sending(span := self._begin_span(to, kind, what)):
            made = super().call_async(to, kind, what, *rest, **more)
        if span is not None:
            end_with(span, made)
        return made

    def call_stream(self, to: Any, what: Any, *rest: Any, **more: Any) -> RpcStream[Any]:
        with _Sending(self._begin_span(to, STREAM, what)):
            return super().call_stream(to, what, *rest, **more)

    def _begin_span(self, to: Any, kind: int, what: Any) -> Span | None:
        tracer = switch.tracer()
        if tracer is None or kind > STREAM or is_own(what):
            return None
        from opentelemetry.trace import SpanKind

        # For a reference, ``what`` names the value, which would make too many span names.
        name = TO_HERE if kind in (FETCH, SCRIPT_FETCH) else describe(what)
        peer = to.name if isinstance(to, WorkerInfo) else str(to)
        attributes = {**SYSTEM, "rpc.method": name, "rally.peer": peer}
        return tracer.start_span(name, self._spans.surroundings(), SpanKind.CLIENT, attributes)

    def _pickle(
        self, kind: int, content: tuple[Any, ...], outgoing: Outgoing, flags: int, call: Call
    ) -> tuple[bytes, TensorWriter | None, int]:
        span = _SENDING.get()
        if span is not None and kind in _FUNCTIONS:
            from opentelemetry.trace import set_span_in_context

            headers = self._spans.headers(set_span_in_context(span))
            content, flags = (headers, content), flags | FLAG_TRACED
        return super()._pickle(kind, content, outgoing, flags, call)

    def _dispatch(self, outgoing: Outgoing, kind: int, call: Call, *rest: Any, **more: Any) -> None:
        span, done = _SENDING.get(), call.on_done
        if kind == STREAM and span is not None and done is not None:

            def end(call: Call) -> None:
                if call.error is not None:
                    self._spans.note_error(span, call.error)
                span.end()
                done(call)

            call.on_done = end
        super()._dispatch(outgoing, kind, call, *rest, **more)


class _Sending:
    """A block that sends a call. An error ends its span.

    Args:
        span: the call's; None: the call is not traced, even if it is made within one that is.
    """

    def __init__(self, span: Span | None) -> None:
        self._span = span

    def __enter__(self) -> None:
        self._token = _SENDING.set(self._span)

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        _SENDING.reset(self._token)
        if error is not None and self._span is not None:
            from rallypoint.tracing import spans

            spans.note_error(self._span, error)
            self._span.end()


def end_with(span: Span, future: NativeFuture[Any]) -> None:
    """End a span when a future is done."""
    from rallypoint.tracing import spans

    def end(done: Future[Any]) -> None:
        try:
            Future.value(done)  # not RpcFuture's, which would record that the answer was looked at
        except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits for the future
            spans.note_error(span, error)
            # The future keeps the error, which would keep this frame alive, and so the future.
            raised.forget_frames(error)
        span.end()

    # Not RpcFuture's method, which would give the callback a thread of its own.
    NativeFuture.add_done_callback(future, end)
