"""The values of a command line, converted to their types; errors name them as the user wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rallypoint.errors import ConfigError
from rallypoint.launch.config import DEFAULT_SHUTDOWN_TIMEOUT


_FACTORS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Values:
    """One command line on its way to a config.

    Args:
        values: each flag's text by its ``dest``, as :func:`.flags.resolve` returns them.
        origins: where each comes from.
        env: the environment.

    Attributes:
        remarks: what the user should know about this command line; readers add to it.
    """

    def __init__(
        self, values: Mapping[str, str | None], origins: Mapping[str, str], env: Mapping[str, str]
    ) -> None:
        self._values = values
        self._origins = origins
        self.env = env
        self.remarks: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __getitem__(self, dest: str) -> str | None:
        return self._values[dest]

    def is_set(self, dest: str) -> bool:
        """Whether the user gave it, as a flag or a variable; ``standalone`` must also be on."""
        if dest == "standalone":
            return self.switch(dest)
        return self._origins[dest] != "default"

    def is_flag(self, dest: str) -> bool:
        """Whether the user gave it on the command line."""
        return self._origins[dest] == "flag"

    def shown(self, dest: str) -> str:
        """The name the user used: the flag, or the variable."""
        origin = self._origins[dest]
        return origin if origin.startswith("PET_") else "--" + dest.replace("_", "-")

    def text(self, dest: str) -> str:
        return self._values[dest] or ""

    def switch(self, dest: str) -> bool:
        return int(self.text(dest) or "0") != 0

    def integer(self, dest: str, *, least: int) -> int:
        text = self.text(dest)
        try:
            number = int(text)
        except ValueError:
            raise ConfigError(self.shown(dest), text, "expected a whole number") from None
        if number < least:
            raise ConfigError(self.shown(dest), text, f"expected {least} or more")
        return number

    def port(self, dest: str) -> int | None:
        if self._values[dest] is None:
            return None
        port = self.integer(dest, least=0)
        if port > 65535:
            raise ConfigError(self.shown(dest), str(port), "expected a port from 0 to 65535")
        return port

    def size(self, dest: str) -> int:
        """A size in bytes, written as ``100M``; 0: none."""
        text = self.text(dest).strip().upper().removesuffix("B").removesuffix("I")
        factor = _FACTORS.get(text[-1:], 0)
        digits = text[:-1] if factor else text
        if not (digits.isascii() and digits.isdigit()):
            raise ConfigError(
                self.shown(dest), self.text(dest), "expected a size such as 500K, 100M or 2G"
            )
        return int(digits) * (factor or 1)

    def seconds(self, dest: str) -> float:
        return duration(self.text(dest), self.shown(dest))


def shutdown_timeout(values: Values) -> float:
    """How many seconds workers have between SIGTERM and SIGKILL: the flag, or torchrun's variable."""
    if values["shutdown_timeout"] is not None:
        return values.seconds("shutdown_timeout")
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    text = values.env.get(variable)
    return DEFAULT_SHUTDOWN_TIMEOUT if text is None else duration(text, variable)


def duration(text: str, shown: str) -> float:
    """Seconds, 0 or more."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ConfigError(shown, text, "expected a number of seconds, 0 or more")
    return seconds


def exit_codes(text: str, shown: str) -> frozenset[int]:
    """Exit codes, as ``75,143``.

    Args:
        text: the flag's text.
        shown: the flag's name, for errors.

    Raises:
        ConfigError: one is not an exit code of a failed job.
    """
    words = [each.strip() for each in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and 0 < int(word) < 256):
            hint = "143 is that of a job which SIGTERM has ended"
            raise ConfigError(shown, text, "expected exit codes from 1 to 255, as 75,143", hint)
    return frozenset(map(int, words))
