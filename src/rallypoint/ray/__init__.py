"""Jobs on a Ray cluster: a supervisor in each bundle of a placement group (``pip install rallypoint[ray]``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rallypoint.errors import ConfigError


if TYPE_CHECKING:
    from .trainer import RallyTrainer

__all__ = ["RallyTrainer"]


def __getattr__(name: str) -> Any:  # Any: the name above, loaded on first use
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import ray  # noqa: F401
    except ImportError:
        hint = "pip install 'rallypoint[ray]'"
        raise ConfigError(
            "rallypoint.ray", None, "needs Ray, which is not installed", hint
        ) from None
    from .trainer import RallyTrainer

    return RallyTrainer
