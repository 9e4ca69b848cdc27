"""Rallypoint: start, watch, restart and explain distributed PyTorch jobs.

Importing this package is cheap, has no side effects, and does not import torch.
Its parts are :mod:`rallypoint.launch` (``rally run`` and function launches), :mod:`rallypoint.rendezvous` and, on top of
torch, :mod:`rallypoint.elastic`, :mod:`rallypoint.rpc`, :mod:`rallypoint.parallel`, :mod:`rallypoint.join` and
:mod:`rallypoint.compat`. :mod:`rallypoint.events` has the events they emit. :func:`progress` reports how far a script is.
"""

from typing import TYPE_CHECKING, Any

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


if TYPE_CHECKING:
    from rallypoint._core.step_reports import progress

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


def __getattr__(name: str) -> Any:  # Any: the name above, loaded on first use
    if name == "progress":
        from rallypoint._core import step_reports

        return step_reports.progress
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
