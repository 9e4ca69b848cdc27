"""Spans around running code: where they belong, and how they record errors. Needs OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import context as contexts, trace
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rallypoint._core import env as environment


# Characters of an error's message that a span keeps.
LONGEST_MESSAGE = 1000

_words = TraceContextTextMapPropagator()
# Environment variables, and the headers they stand for.
_VARIABLES = {"TRACEPARENT": "traceparent", "TRACESTATE": "tracestate"}


def surroundings() -> contexts.Context:
    """Where a span of this thread belongs: below the current span, or else below the process's own place in a trace."""
    current = contexts.get_current()
    if trace.get_current_span(current).get_span_context().is_valid:
        return current
    return outside(environment.snapshot())


def outside(env: Mapping[str, str]) -> contexts.Context:
    """A process's place in a trace, as its parent set it in the environment (W3C Trace Context in variables)."""
    return below({header: env[name] for name, header in _VARIABLES.items() if name in env})


def variables(context: contexts.Context) -> dict[str, str]:
    """Environment variables for a process whose spans belong below the span of ``context``."""
    found = headers(context)
    return {name: found[header] for name, header in _VARIABLES.items() if header in found}


def below(headers: Any) -> contexts.Context:
    """The context given by W3C Trace Context headers; the context of a new trace if they are not such headers."""
    if not isinstance(headers, Mapping) or not all(
        isinstance(each, str) for each in headers.values()
    ):
        headers = {}
    return _words.extract(headers, contexts.get_current())


def headers(context: contexts.Context) -> dict[str, str]:
    """W3C Trace Context headers for the span of ``context``."""
    found: dict[str, str] = {}
    _words.inject(found, context)
    return found


def note_error(span: Span, error: BaseException) -> None:
    """Record on the span that its work failed."""
    span.set_attribute("error.type", type(error).__qualname__)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  its class is the user's
        message = ""
    span.set_status(Status(StatusCode.ERROR, message[:LONGEST_MESSAGE]))


# Classes, not functions decorated by contextlib, which assigns the traceback of an exception that passes through: a user's
# exception class may forbid that.


class Ending:
    """A block that ends a span and records an error on it.

    Args:
        span: the span, already started.
    """

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        # GeneratorExit is no error: the consumer of the items wants no more.
        if error is not None and not isinstance(error, GeneratorExit):
            note_error(self._span, error)
        self._span.end()


class Attached:
    """A block in which a context is current in this thread or task.

    Args:
        context: the context.
    """

    def __init__(self, context: contexts.Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = contexts.attach(self._context)

    def __exit__(self, *_: object) -> None:
        contexts.detach(self._token)
