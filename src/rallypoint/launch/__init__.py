"""Start, watch, restart and explain the worker processes of a job.

``rally run`` is :mod:`rallypoint.launch.run_command`; function launches are :func:`launch_subprocesses`.
Importing this package does not import torch and has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from rallypoint.control.client import RunningJob, connect

    from .functions import (
        MultiprocessConfig,
        default_backend,
        get_distributed_backend,
        init_and_run,
        init_dist,
        init_process_group_from_backend,
        launch_subprocesses,
        parallel_mesh,
        set_distributed_backend,
    )
    from .placement.clusters import Cluster, ClusterLevel, ClusterVariables, Placement

__all__ = [
    "Cluster",
    "ClusterLevel",
    "ClusterVariables",
    "MultiprocessConfig",
    "Placement",
    "RunningJob",
    "connect",
    "default_backend",
    "get_distributed_backend",
    "init_and_run",
    "init_dist",
    "init_process_group_from_backend",
    "launch_subprocesses",
    "parallel_mesh",
    "set_distributed_backend",
]


def __getattr__(name: str) -> Any:  # Any: the names above, loaded on first use
    if name in __all__:
        from rallypoint.control import client

        from .placement import clusters

        if name in {"RunningJob", "connect"}:
            return getattr(client, name)
        if name in clusters.__all__:
            return getattr(clusters, name)
        from . import functions

        return getattr(functions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
