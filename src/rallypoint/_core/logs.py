"""Log lines of the command ``rally``. In a user's program, logging is the program's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rallypoint.errors import ConfigError

from . import event_sinks


VARIABLE = "LOGLEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def set_up(env: Mapping[str, str]) -> None:
    """Write this package's log lines to stderr, from the level that ``LOGLEVEL`` names on.

    Raises:
        ConfigError: there is no such level.
    """
    level = env.get(VARIABLE) or "WARNING"
    if level.upper() not in _LEVELS:
        raise ConfigError(VARIABLE, level, "no such level", f"expected one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("rally: %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("rallypoint")
    ours.addHandler(handler)
    ours.setLevel(level.upper())
    if env.get(event_sinks.VARIABLE) == event_sinks.TO_LOG:
        logging.getLogger("rallypoint.events").setLevel(logging.INFO)
