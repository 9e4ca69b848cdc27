"""Jobs on a Ray cluster: a supervisor in each bundle of a placement group (``pip install rallypoint[ray]``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import installation
from .bundles import Bundles


if TYPE_CHECKING:
    from rallypoint.launch.multiprocess_config import MultiprocessConfig
    from rallypoint.launch.worker import payload

    from .trainer import RallyTrainer

__all__ = ["Bundles", "RallyTrainer"]


def call_on_hosts(call: payload.Call, cfg: MultiprocessConfig) -> list[Any]:
    """Lets this module itself be passed as ``launch_subprocesses(…, hosts=rallypoint.ray)``. See :class:`Bundles`."""
    return Bundles().call_on_hosts(call, cfg)


def __getattr__(name: str) -> Any:  # Any: the name above, loaded on first use
    if name != "RallyTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return installation.trainer_type()
