"""Where spans are sent: exporters of OpenTelemetry, found by name."""

from __future__ import annotations

import threading
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from rallypoint.errors import ConfigError


if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


# Names the exporter, for all processes of a job.
VARIABLE = "RALLY_TRACES"
# The group in which exporters are announced, and what implements a name that is not there.
_GROUP = "opentelemetry_traces_exporter"
_MEANT = {"otlp": ("otlp_proto_http", "otlp_proto_grpc")}
# Seconds that the last spans may take on their way out.
LAST_SECONDS = 2.0
_INSTALL = "pip install 'rallypoint[traces]'"


def check(name: str, shown: str) -> None:
    """Check that spans can be sent by this exporter. Costs no import of it.

    Args:
        name: of the exporter.
        shown: the setting that names it.

    Raises:
        ConfigError: OpenTelemetry or the exporter is not installed.
    """
    _find(name, shown)


def provider_for(name: str, shown: str, attributes: dict[str, Any]) -> TracerProvider:
    """A provider whose spans go to an exporter, in batches, from a thread of its own. To be :func:`shut_down`.

    The exporter reads its settings from the environment (``OTEL_EXPORTER_OTLP_ENDPOINT`` and others).

    Args:
        name: of the exporter.
        shown: the setting that names it.
        attributes: of the resource, unless ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES`` says otherwise.

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
    """Send what is left. Blocks for up to two seconds: a collector that is down must not hold up the end of a process."""
    # The exporter's own time limits add up to more.
    thread = threading.Thread(target=provider.shutdown, name="rally-traces", daemon=True)
    thread.start()
    thread.join(LAST_SECONDS)


def _find(name: str, shown: str) -> EntryPoint:
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
