"""The settings of a rendezvous: torchelastic's parameters, checked on construction."""

from __future__ import annotations

from typing import Any

from rallypoint.errors import ConfigError

from .option import as_bool, as_int, as_seconds


class RendezvousParameters:
    """Which rendezvous to use, for which job, with how many nodes.

    Attributes have torch's names, so a function that makes a handler from torch's object also takes ours.

    Args:
        backend: name of the backend.
        endpoint: where nodes meet (:func:`.parse_endpoint`); some backends need none.
        run_id: the job's name.
        min_nodes: the fewest nodes that form a round.
        max_nodes: the most nodes that form a round.
        local_addr: the name or address by which other nodes reach this one, or None to find out.
        config: options of the backend (``--rdzv-conf``); values may be text.

    Raises:
        ConfigError: a value is invalid; the error says which.
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
        """An option as given.

        Args:
            key: its name.
            default: what to return if it was not given.
        Returns:
            Its value, often text; or ``default``.
        """
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """An option as true or false.

        Args:
            key: its name.
            default: what to return if it was not given.
        Returns:
            Its value; ``default``; or None if it was given as None.
        Raises:
            ConfigError: it is not true, false, 1, 0, t, f, yes, no, y or n.
        """
        value = self.get(key, default)
        return None if value is None else as_bool(f"--rdzv-conf {key}", value)

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """An option as a whole number.

        Args:
            key: its name.
            default: what to return if it was not given.
        Returns:
            Its value; ``default``; or None if it was given as None.
        Raises:
            ConfigError: it is not a whole number (2.0, "2.5" and True are not).
        """
        value = self.get(key, default)
        return None if value is None else as_int(f"--rdzv-conf {key}", value)

    def get_as_seconds(self, key: str, default: float) -> float:
        """An option as a duration.

        Args:
            key: its name.
            default: seconds, if it was not given or is None.
        Returns:
            Seconds, above 0 and finite.
        Raises:
            ConfigError: it is not such a number.
        """
        value = self.get(key)
        return as_seconds(f"--rdzv-conf {key}", default if value is None else value)


# Untyped programs may pass anything. These are functions so that the type checker does not call the checks redundant.
def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
