"""What a rendezvous is made from: torchelastic's parameters, checked when they are given."""

from __future__ import annotations

import math
from typing import Any

from rallypoint.errors import ConfigError


_TRUE = frozenset({"1", "true", "t", "yes", "y"})
_FALSE = frozenset({"0", "false", "f", "no", "n"})


class RendezvousParameters:
    """Which rendezvous, of which job, for how many nodes.

    Attributes have torch's names, so that a function that makes a handler from torch's object makes
    one from ours.

    Args:
        backend: name of the backend.
        endpoint: where nodes meet (:func:`.parse_endpoint`); some backends need none.
        run_id: the job's name.
        min_nodes: the fewest nodes a round is formed with.
        max_nodes: the most.
        local_addr: the name or address by which other nodes reach this one, or None to find out.
        config: options of the backend (``--rdzv-conf``); values may be text.

    Raises:
        ConfigError: a value is impossible; says which.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **config: Any,
    ) -> None:
        for name, text in (("backend", backend), ("run_id", run_id)):
            if not _is_text(text) or not text:
                raise ConfigError(name, text, "expected text that is not empty")
        for name, text in (("endpoint", endpoint), ("local_addr", local_addr or "")):
            if not _is_text(text):
                raise ConfigError(name, text, "expected text")
        for name, number in (("min_nodes", min_nodes), ("max_nodes", max_nodes)):
            if not _is_integer(number) or number < 1:
                raise ConfigError(name, number, "expected a whole number, 1 or more")
        if max_nodes < min_nodes:
            raise ConfigError("max_nodes", max_nodes, f"expected min_nodes ({min_nodes}) or more")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config: dict[str, Any] = config

    def get(self, key: str, default: Any = None) -> Any:
        """The option ``key`` as it was given, or ``default``."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """The option ``key`` as true or false; ``default`` if it is not given, None if it is None.

        Raises:
            ConfigError: it is neither.
        """
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).strip().lower() if isinstance(value, str | int) else ""
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise self._wrong(key, value, "true or false (also 1/0, t/f, yes/no, y/n)")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """The option ``key`` as a whole number; ``default`` if it is not given, None if it is None.

        Raises:
            ConfigError: it is none; 2.0, "2.5" and True are none.
        """
        value = self.get(key, default)
        if value is None:
            return None
        if _is_integer(value):
            return int(value)
        try:
            if isinstance(value, str):
                return int(value)
        except ValueError:
            pass  # told below, as for every other type
        raise self._wrong(key, value, "a whole number")

    def get_as_seconds(self, key: str, default: float) -> float:
        """The option ``key`` as a length of time in seconds; ``default`` if it is not given or None.

        Raises:
            ConfigError: it is no number, not above 0, or without end.
        """
        value = self.get(key)
        if value is None:
            value = default
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise self._wrong(key, value, "seconds: a number above 0, such as 30 or 0.5")
        return number

    def _wrong(self, key: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"--rdzv-conf {key}", value, f"expected {expected}")


# Programs that are not type-checked hand over anything; these two ask without the checker knowing.
def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
