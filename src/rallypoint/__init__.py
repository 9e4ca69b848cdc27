"""Rallypoint: start, watch, restart and explain distributed PyTorch jobs.

Importing this package is cheap, has no side effects, and does not import torch.
Its parts: :mod:`rallypoint.launch` (``rally run`` and function launches) and :mod:`rallypoint.rendezvous`; and on top of
torch :mod:`rallypoint.rpc`, :mod:`rallypoint.parallel`, :mod:`rallypoint.join` and :mod:`rallypoint.compat`. What they report
as they run is in :mod:`rallypoint.events`. :func:`progress` reports how far a script is.
"""

from rallypoint._core.step_reports import progress
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
    "progress",
]
