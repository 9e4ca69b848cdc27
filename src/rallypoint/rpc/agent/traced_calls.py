"""Serves calls that are traced: each is a span below that of its caller."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from rallypoint.rpc.connections.calls import describe
from rallypoint.rpc.rref_proxy import AnswerLater
from rallypoint.rpc.torch_private import NativeFuture
from rallypoint.tracing import switch

from .counters import is_own
from .traced_caller import SYSTEM, end_with


if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer


def below(headers: Any, content: Any, caller: str, *, is_stream: bool) -> Any:
    """Wrap a call so that it makes a span when it runs.

    Args:
        headers: the caller's; all but those of W3C Trace Context are ignored.
        content: a function, its positional and its keyword arguments.
        caller: the name of the worker that calls.
        is_stream: the function returns the items of a stream.

    Returns:
        The content with the function wrapped; unchanged if this process does not trace.
    """
    tracer = switch.tracer()
    func, *rest = content
    if tracer is None or is_own(func):
        return content
    return _TracedFunction(func, tracer, headers, caller, is_stream=is_stream), *rest


class _TracedFunction:
    """Behaves like the function, even for code that compares, names or looks up functions."""

    def __init__(
        self, func: Any, tracer: Tracer, headers: Any, caller: str, *, is_stream: bool
    ) -> None:
        functools.update_wrapper(self, func)  # also marks such as that of @async_execution
        self._func = func
        self._tracer = tracer
        self._headers = headers
        self._caller = caller
        self._is_stream = is_stream

    def __eq__(self, other: object) -> bool:
        return bool(self._func == (other._func if isinstance(other, _TracedFunction) else other))

    def __hash__(self) -> int:
        return hash(self._func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from opentelemetry.trace import SpanKind, set_span_in_context

        from rallypoint.tracing import spans

        name = describe(self._func)
        attributes = {**SYSTEM, "rpc.method": name, "rally.peer": self._caller}
        outside = spans.below(self._headers)
        span = self._tracer.start_span(name, outside, SpanKind.SERVER, attributes)
        inside = set_span_in_context(span, outside)
        try:
            with spans.Attached(inside):
                result = self._func(*args, **kwargs)
        except BaseException as error:
            spans.note_error(span, error)
            span.end()
            raise
        if inspect.iscoroutine(result):
            return _awaited(span, inside, result)
        if self._is_stream:
            items = _async_items if inspect.isasyncgen(result) else _items
            return items(span, inside, result)
        later = result.future if type(result) is AnswerLater else result
        if isinstance(later, NativeFuture):
            end_with(span, later)
        else:
            span.end()
        return result


async def _awaited(span: Span, inside: Context, coroutine: Any) -> Any:
    from rallypoint.tracing import spans

    with spans.Ending(span), spans.Attached(inside):
        return await coroutine


def _items(span: Span, inside: Context, items: Any) -> Iterator[Any]:
    from rallypoint.tracing import spans

    items = iter(items)
    with spans.Ending(span):
        try:
            while True:
                # Only while it runs: between two items, the thread may do something else.
                with spans.Attached(inside):
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item
        finally:
            if (close := getattr(items, "close", None)) is not None:
                close()


async def _async_items(span: Span, inside: Context, items: Any) -> AsyncIterator[Any]:
    from rallypoint.tracing import spans

    with spans.Ending(span):
        try:
            while True:
                with spans.Attached(inside):
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item
        finally:
            await items.aclose()
