"""Turns the events of this process into OpenTelemetry spans."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, assert_never

from rallypoint import events
from rallypoint._core import forks

from . import exporters
from .timeline import Begin, End, Note, Step, Timeline


if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


class SpanLog:
    """Receives the events of this process until it is closed, from any thread.

    Args:
        provider: makes the spans; shut down on close.
        env: the process's environment. Its ``TRACEPARENT``, if set, is the parent of all spans.
    """

    def __init__(self, provider: TracerProvider, env: Mapping[str, str]) -> None:
        # Not at the top: most jobs run without OpenTelemetry.
        from . import spans

        self._provider = provider
        self._tracer = provider.get_tracer("rallypoint")
        self._outside = spans.outside(env)
        self._timeline = Timeline()
        self._spans: dict[str, Span] = {}
        self._lock = forks.Lock()
        self._subscription = events.subscribe(self._take)

    def variables(self) -> dict[str, str]:
        """Environment variables for processes whose spans belong below ours (W3C Trace Context)."""
        from . import spans

        with self._lock:
            key = self._timeline.innermost
            return {} if key is None else spans.variables(self._below(key))

    def close(self) -> None:
        """End and send all spans. Blocks for up to two seconds if they cannot be sent."""
        self._subscription.close()
        with self._lock:
            for step in self._timeline.close():
                self._do(step)
        exporters.shut_down(self._provider)

    def _take(self, event: events.Event) -> None:
        with self._lock:
            for step in self._timeline.take(event):
                self._do(step)

    def _do(self, step: Step) -> None:
        match step:
            case Begin():
                began = time.time_ns() - round(step.seconds_ago * 1e9)
                self._spans[step.key] = self._tracer.start_span(
                    step.name,
                    self._outside if step.parent is None else self._below(step.parent),
                    attributes=step.attributes,
                    start_time=began,
                )
            case End():
                self._end(self._spans.pop(step.key), step.error, step.attributes)
            case Note():
                self._spans[step.key].add_event(step.name, step.attributes)
            case _:
                assert_never(step)

    def _below(self, key: str) -> Any:
        from opentelemetry import trace

        return trace.set_span_in_context(self._spans[key], self._outside)

    def _end(self, span: Span, error: str, attributes: Mapping[str, Any]) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_attributes(attributes)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()
