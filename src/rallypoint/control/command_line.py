"""The arguments of a command about a job: its name, ranks, flags. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rallypoint.errors import ConfigError


@dataclass(slots=True)
class Given:
    """The parsed arguments.

    Args:
        job: the job's name; empty: the only job.
        ranks: the ranks given by ``--rank``; empty: all.
        switches: the given flags that take no value.
        values: the values of the other flags.
    """

    job: str = ""
    ranks: list[int] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)


def parse(
    command: str, words: Sequence[str], *, switches: Collection[str], values: Collection[str] = ()
) -> Given:
    """Parse the arguments of a command.

    Args:
        command: its name, for messages.
        words: the arguments after it.
        switches: flags that take no value.
        values: flags that take one, besides ``--rank``.
    Raises:
        ConfigError: a flag is unknown or lacks its value, a rank is not a number, or there are two jobs.
    """
    given = Given()
    help_words = f"rally {command} --help"
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, value = word.partition("=")
        if flag in {"--rank", *values}:
            if not has_value:
                value = rest.pop(0) if rest else ""
            if not value:
                raise ConfigError(command, flag, "expected a value", help_words)
            if flag == "--rank":
                given.ranks += _ranks(value, help_words)
            else:
                given.values[flag] = value
        elif word in switches:
            given.switches.add(word)
        elif word.startswith("-"):
            known = ", ".join(["--rank", *values, *switches])
            raise ConfigError(command, word, f"no such flag (known: {known})", help_words)
        elif given.job:
            raise ConfigError(command, f"{given.job} {word}", "expected one job", help_words)
        else:
            given.job = word
    return given


def _ranks(value: str, help_words: str) -> list[int]:
    try:
        return [int(each) for each in value.split(",")]
    except ValueError:
        raise ConfigError("--rank", value, "expected ranks, such as 3 or 0,3", help_words) from None
