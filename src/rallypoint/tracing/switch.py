"""Whether this process traces, and with what."""

from __future__ import annotations

import atexit
import logging
import os
from typing import TYPE_CHECKING, Any

from rallypoint._core import env as environment, forks
from rallypoint.errors import ConfigError

from . import exporters


if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider


_log = logging.getLogger(__name__)
_NAME = "rallypoint"


class _Switch:
    def __init__(self) -> None:
        self._lock = forks.Lock()
        self._tracer: Tracer | None = None
        self._is_read = False  # whether the environment has been read

    def enable(self, tracer_provider: TracerProvider | None = None) -> None:
        """Trace the rpc agents that this process starts from now on.

        Args:
            tracer_provider: makes the spans; None: OpenTelemetry's global one
                (``opentelemetry.trace.set_tracer_provider``).

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry import trace
        except ImportError:
            raise ConfigError(
                "tracing",
                "enable()",
                "OpenTelemetry is not installed: pip install 'rallypoint[traces]'",
            ) from None
        provider = trace.get_tracer_provider() if tracer_provider is None else tracer_provider
        with self._lock:
            self._tracer, self._is_read = provider.get_tracer(_NAME), True

    def disable(self) -> None:
        """Trace no agent that this process starts from now on."""
        with self._lock:
            self._tracer, self._is_read = None, True

    def is_enabled(self) -> bool:
        """Whether rpc agents that this process starts are traced.

        Returns:
            True after :func:`enable`, or if ``RALLY_TRACES`` names an exporter.
        """
        return self.tracer() is not None

    def tracer(self) -> Tracer | None:
        """The tracer that makes this process's spans; None: the process does not trace."""
        if not self._is_read:
            with self._lock:
                if not self._is_read:
                    self._tracer, self._is_read = _from_environment(), True
        return self._tracer


def _from_environment() -> Tracer | None:
    """The tracer for ``RALLY_TRACES``: from the provider that the script has set up, or else from one set up here."""
    name = environment.get(exporters.VARIABLE)
    if not name:
        return None
    try:
        from opentelemetry import trace

        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            run, rank = environment.get("TORCHELASTIC_RUN_ID"), environment.get("RANK")
            attributes = resource_attributes(run or "", rank)
            provider = exporters.provider_for(name, exporters.VARIABLE, attributes)
            trace.set_tracer_provider(provider)
            atexit.register(exporters.shut_down, provider)
        return trace.get_tracer(_NAME)
    except ImportError:
        _log.warning(
            "%s=%s has no effect: OpenTelemetry is not installed", exporters.VARIABLE, name
        )
    except ConfigError as error:
        _log.warning("this process is not traced: %s", error)
    return None


def resource_attributes(run_id: str, rank: str | None = None) -> dict[str, Any]:
    """Resource attributes that distinguish this process from others."""
    found: dict[str, Any] = {
        "service.name": _NAME,
        "rally.run_id": run_id,
        "host.name": os.uname().nodename,
        "process.pid": os.getpid(),
    }
    return found if rank is None else {**found, "rally.rank": rank}


_switch = _Switch()
enable, disable, is_enabled = _switch.enable, _switch.disable, _switch.is_enabled
tracer = _switch.tracer
