"""Where spans are sent: OpenTelemetry exporters, found by name."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from rallypoint.errors import ConfigError


if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from opentelemetry.sdk.trace import TracerProvider


# The environment variable that names the exporter for all processes of a job.
VARIABLE = "RALLY_TRACES"
# The entry-point group of exporters, and the exporters that implement a name the group does not have.
_GROUP = "opentelemetry_traces_exporter"
_MEANT = {"otlp": ("otlp_proto_http", "otlp_proto_grpc")}
# Seconds allowed for sending the last spans.
LAST_SECONDS = 2.0
_INSTALL = "pip install 'rallypoint[traces]'"


def check(name: str, shown: str) -> None:
    """Check that this exporter can send spans, without importing it.

    Args:
        name: the exporter's name.
        shown: the setting that names it.

    Raises:
        ConfigError: OpenTelemetry or the exporter is not installed.
    """
    _find(name, shown)


def provider_for(name: str, shown: str, attributes: dict[str, Any]) -> TracerProvider:
    """A provider that sends its spans to an exporter in batches, from its own thread. The caller passes it to :func:`shut_down`.

    The exporter reads its settings from the environment (``OTEL_EXPORTER_OTLP_ENDPOINT`` and others).

    Args:
        name: the exporter's name.
        shown: the setting that names it.
        attributes: the resource's, unless ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES`` says otherwise.

    Raises:
        ConfigError: OpenTelemetry or the exporter is not installed, or the exporter does not start.
    """
    found = _find(name, shown)
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = found.load()()
    except Exception as error:
        raise ConfigError(shown, name, f"this exporter does not start: {error}") from error
    resource = Resource.create(attributes).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def shut_down(provider: TracerProvider) -> None:
    """Send what is left. Blocks for up to two seconds: a collector that is down must not delay a process's exit."""
    # The exporter's own time limits add up to more.
    thread = threading.Thread(target=provider.shutdown, name="rally-traces", daemon=True)
    thread.start()
    thread.join(LAST_SECONDS)


def _find(name: str, shown: str) -> EntryPoint:
    from importlib.metadata import (
        entry_points,  # costs every supervisor 50 ms and 2.5 MiB, if imported above
    )

    known = {each.name: each for each in entry_points(group=_GROUP)}
    for each in (name, *_MEANT.get(name, ())):
        if each in known:
            return known[each]
    if not known or name in _MEANT:
        raise ConfigError(
            shown, name, f"this exporter of OpenTelemetry is not installed: {_INSTALL}"
        )
    names = ", ".join(sorted({*known, *_MEANT}))
    raise ConfigError(shown, name, f"expected an exporter of OpenTelemetry: {names}")
