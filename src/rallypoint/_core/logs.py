"""Logging of the command ``rally``. In a user's program, the program configures logging."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rallypoint.errors import ConfigError

from . import event_sinks


VARIABLE = "LOGLEVEL"


def set_up(env: Mapping[str, str]) -> None:
    """Write this package's log lines of level ``LOGLEVEL`` and above to stderr.

    Raises:
        ConfigError: ``LOGLEVEL`` is not a known level.
    """
    level = env.get(VARIABLE) or "WARNING"
    levels = logging.getLevelNamesMapping()  # WARN, FATAL and NOTSET among them
    if level.upper() not in levels:
        raise ConfigError(VARIABLE, level, "no such level", f"expected one of {', '.join(levels)}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("rally: %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("rallypoint")
    ours.addHandler(handler)
    ours.setLevel(level.upper())
    if env.get(event_sinks.VARIABLE) == event_sinks.TO_LOG:
        logging.getLogger("rallypoint.events").setLevel(logging.INFO)
