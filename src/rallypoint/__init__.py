"""Rallypoint: start, watch, restart and explain distributed PyTorch jobs.

Importing this package costs nothing and starts nothing; torch is not imported.
The parts: :mod:`rallypoint.launch` (``rally run`` and function launches), :mod:`rallypoint.rendezvous`, and over torch
:mod:`rallypoint.parallel` and :mod:`rallypoint.join`.
"""

from rallypoint.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    LaunchError,
    RallyError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeout,
    WorkersFailed,
)


__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DeadlineExceeded",
    "InternalError",
    "LaunchError",
    "RallyError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousTimeout",
    "WorkersFailed",
    "__version__",
]
