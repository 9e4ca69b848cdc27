"""Rallypoint: start, watch, restart and explain distributed PyTorch jobs.

Importing this package is cheap, has no side effects, and does not import torch.
Its parts are :mod:`rallypoint.launch` (``rally run`` and function launches), :mod:`rallypoint.rendezvous` and, on top of
torch, :mod:`rallypoint.elastic`, :mod:`rallypoint.rpc`, :mod:`rallypoint.parallel`, :mod:`rallypoint.join` and
:mod:`rallypoint.compat`. :mod:`rallypoint.events` has the events they emit. :func:`progress` reports how far a script is.
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
