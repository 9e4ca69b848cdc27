"""Options from ``--rdzv-conf`` and from an endpoint's ``?NAME=VALUE``: their types and how they are parsed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rallypoint.errors import ConfigError


_BOOLEANS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a rendezvous backend.

    Args:
        name: as users write it.
        help: what it sets, in one phrase, with unit and default.
        kind: the type of its value: ``str``, ``int``, ``bool``, or ``float`` for seconds above 0.
        aliases: other names for it in ``--rdzv-conf``.
        tls: whether the option concerns encryption, so that only schemes with TLS accept it.
    """

    name: str
    help: str
    kind: type[str | int | float | bool] = str
    aliases: tuple[str, ...] = ()
    tls: bool = False

    def read(self, value: object, shown: str) -> str | int | float | bool:
        """The value in the option's type.

        Args:
            value: text, or a value of that type.
            shown: the flag the user gave it with, for the error: ``--rdzv-conf lease``.
        Returns:
            The value, as ``kind``.
        Raises:
            ConfigError: the value is not of that type.
        """
        if self.kind is bool:
            return as_bool(shown, value)
        if self.kind is int:
            return as_int(shown, value)
        return as_seconds(shown, value) if self.kind is float else str(value)


def as_bool(shown: str, value: object) -> bool:
    """``value`` as true or false; ``shown`` names it in the ConfigError."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower() if isinstance(value, str | int) else ""
    if word not in _BOOLEANS:
        expected = "expected true or false (also 1/0, t/f, yes/no, y/n)"
        raise ConfigError(shown, value, expected)
    return _BOOLEANS[word]


def as_int(shown: str, value: object) -> int:
    """``value`` as a whole number; 2.0, "2.5" and True are refused. ``shown`` names it in the ConfigError."""
    try:
        if isinstance(value, str | int) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass  # the error is raised below, as for every other type
    raise ConfigError(shown, value, "expected a whole number")


def as_seconds(shown: str, value: object) -> float:
    """``value`` as a finite number of seconds above 0; ``shown`` names it in the ConfigError."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # checked by float
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(shown, value, "expected seconds: a number above 0, such as 30 or 0.5")
    return seconds
