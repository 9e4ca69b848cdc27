"""Ray is an optional dependency: the code that needs it is loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.errors import ConfigError


if TYPE_CHECKING:
    from .trainer import RallyTrainer


def trainer_type() -> type[RallyTrainer]:
    """``RallyTrainer``.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray  # noqa: F401
    except ImportError:
        hint = "pip install 'rallypoint[ray]'"
        raise ConfigError(
            "rallypoint.ray", None, "needs Ray, which is not installed", hint
        ) from None
    from .trainer import RallyTrainer

    return RallyTrainer
