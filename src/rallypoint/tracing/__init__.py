"""OpenTelemetry traces of a job: its launch, rendezvous, workers, recoveries and remote calls as spans.

``rally run --traces otlp`` sends them to a collector. A program not started by ``rally run`` calls :func:`enable`, or has
``RALLY_TRACES`` in its environment. Needs ``pip install 'rallypoint[traces]'``.
"""

from __future__ import annotations

from .exporters import VARIABLE
from .switch import disable, enable, is_enabled


__all__ = ["VARIABLE", "disable", "enable", "is_enabled"]
