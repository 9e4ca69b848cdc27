"""The command line of ``python -m rallypoint.ray``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rallypoint.errors import ConfigError
from rallypoint.launch.command_line import given as command_lines
from rallypoint.launch.submit import packed_words


USAGE = """\
usage: python -m rallypoint.ray [--nodes N | --nodes MIN:MAX] [--gpus N] -- [flags of rally run] train.py …

Run a job on the nodes of the Ray cluster that this process is in. --gpus is per node. `rally submit ray` writes
--words=TEXT for what follows --, in letters that no shell interprets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobWords:
    """What a command line asks for, as arguments of ``RallyTrainer``.

    Args:
        target: the script and its arguments.
        flags: flags of ``rally run``.
        num_nodes: the fewest and the most.
        workers: workers per node; None: one for each GPU.
        resources: resources per node.
    """

    target: tuple[str, ...]
    flags: tuple[str, ...]
    num_nodes: tuple[int, int]
    workers: int | None
    resources: Mapping[str, float]


def read(words: Sequence[str]) -> JobWords:
    """Read a command line.

    Raises:
        ConfigError: it cannot work.
    """
    values = {"--nodes": "1", "--gpus": "0", "--words": ""}
    rest = list(words)
    while rest and rest[0] != "--":
        name, equals, value = rest.pop(0).partition("=")
        if name not in values:
            raise ConfigError(name, None, "no such option", "python -m rallypoint.ray --help")
        if not equals and not rest:
            raise ConfigError(name, None, "expected a value after it")
        values[name] = value if equals else rest.pop(0)
    rest = packed_words.unpack(values["--words"], "--words") if values["--words"] else rest[1:]
    given = command_lines.parse(rest)
    if not given.target:
        raise ConfigError("rallypoint.ray", None, "expected -- and a script", "-- train.py")
    flags = rest[: len(rest) - len(given.target)]
    least, _, most = values["--nodes"].partition(":")
    workers = given.values.get("--nproc-per-node")
    if workers is not None:
        flags = _without_workers(flags)
    gpus = _number("--gpus", values["--gpus"])
    return JobWords(
        target=given.target,
        flags=tuple(flags[:-1] if flags[-1:] == ["--"] else flags),
        num_nodes=(_number("--nodes", least), _number("--nodes", most or least)),
        workers=None if workers is None else _number("--nproc-per-node", workers),
        resources={"GPU": float(gpus)} if gpus else {},
    )


def _without_workers(flags: Sequence[str]) -> list[str]:
    """The flags without ``--nproc-per-node``, which is a separate argument here."""
    kept, rest = [], list(flags)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if (
            name.startswith("--")
            and name != "--"
            and command_lines.find(name).name == "--nproc-per-node"
        ):
            if not equals:
                rest.pop(0)
            continue
        kept.append(word)
    return kept


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ConfigError(name, text, "expected a whole number")
    return int(text)
