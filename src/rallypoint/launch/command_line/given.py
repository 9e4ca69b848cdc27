"""A command line of ``rally run``, as it was given: parsing, and what each flag's value is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rallypoint._core import near_words
from rallypoint.errors import ConfigError

from .flags import BY_NAME, FLAGS, Flag


# What argparse, too, takes for a value although it starts with a dash.
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Given:
    """A parsed command line.

    Args:
        values: flag -> value ("1" for switches), for flags on the command line alone.
        target: what follows the flags: the script and its arguments; may be empty.
        help: ``-h`` was among the flags.
    """

    values: Mapping[str, str]
    target: tuple[str, ...]
    help: bool = False


def parse(argv: Sequence[str]) -> Given:
    """Parse flags, then the target: the first word that is not a flag, and all that follows it.

    Raises:
        ConfigError: an unknown or ambiguous flag (the nearest is named), or one without its value.
    """
    values: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words[0]
        if word == "--":
            words.pop(0)
            break
        if not word.startswith("-") or word == "-":
            break
        words.pop(0)
        if word in {"-h", "--help"}:
            return Given(values, tuple(words), help=True)
        name, equals, value = word.partition("=")
        short_and_more = not word.startswith("--") and len(word) > 2
        if short_and_more:
            # -r3 and -r=3, as argparse takes them
            name, equals, value = word[:2], "=", word[2:].removeprefix("=")
        flag = find(name)
        if flag.is_switch:
            values[flag.name] = "1"
            if short_and_more and word[2] != "=":
                words.insert(0, "-" + word[2:])  # -mr3 is -m -r3
            elif equals:
                raise ConfigError(name, value, "this flag takes no value")
            continue
        if not equals:
            value = _value_after(name, flag, words)
        values[flag.name] = value
    return Given(values, tuple(words))


def _value_after(name: str, flag: Flag, words: list[str]) -> str:
    """Take the next word, unless it is a flag itself: then the value was forgotten."""
    expected = f"expected a value ({flag.metavar}) after it"
    if not words:
        raise ConfigError(name, None, expected)
    word = words[0]
    is_flag = word.startswith("-") and len(word) > 1 and " " not in word.partition("=")[0]
    if is_flag and not _NEGATIVE_NUMBER.fullmatch(word):
        hint = f"write {name}={word} if that is the value"
        raise ConfigError(name, None, f"{expected}, found {word}", hint)
    return words.pop(0)


# `mpirun -n 2`, `mpirun -np 2`, `srun -N 2`.
_OF_OTHERS = {"-n": "nproc-per-node", "-N": "nnodes"}


def find(name: str) -> Flag:
    """The flag with this name, written with dashes or underscores, or with an unambiguous abbreviation of it."""
    plain = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    if plain in BY_NAME:
        return BY_NAME[plain]
    if plain.startswith("--") and len(plain) > 2:
        beginning = [flag for flag in FLAGS if flag.name.startswith(plain)]
        # An abbreviation for one of torchrun's flags means that flag here, too.
        beginning = [flag for flag in beginning if not flag.own] or beginning
        if len(beginning) == 1:
            return beginning[0]
        if beginning:
            names = ", ".join(flag.name for flag in beginning)
            raise ConfigError(name, None, f"could be one of {names}")
    near = _OF_OTHERS.get(plain) or _nearest(plain.lstrip("-"))
    hint = f"did you mean --{near}?" if near else "rally run --help lists the flags"
    raise ConfigError(name, None, "no such flag", hint)


def _nearest(word: str) -> str | None:
    """The flag most like ``word``, written without the dashes that all share, or None if none is."""
    known = [flag.name.removeprefix("--") for flag in FLAGS] + ["help"]
    if near := near_words.nearest(word, known):
        return near
    # A misspelt abbreviation: `nprc` is near the beginning of nproc-per-node. Stricter, since
    # beginnings are short and many.
    beginnings = {name[: len(word) + 1]: name for name in reversed(known)}
    near = near_words.nearest(word, beginnings, cutoff=0.8)
    return beginnings[near] if near else None


def resolve(given: Given, env: Mapping[str, str]) -> tuple[dict[str, str | None], dict[str, str]]:
    """Values by precedence: flag, then ``PET_…``, then default.

    Returns:
        Each flag's value by its ``dest`` (None: not set at all), and where it came from: ``flag``,
        the variable's name, or ``default``.
    """
    values: dict[str, str | None] = {}
    origins: dict[str, str] = {}
    for flag in FLAGS:
        if flag.name in given.values:
            value, origin = given.values[flag.name], "flag"
        elif flag.env and flag.variable in env:
            value, origin = env[flag.variable], flag.variable
        else:
            values[flag.dest] = "0" if flag.is_switch else flag.default
            origins[flag.dest] = "default"
            continue
        shown = flag.name if origin == "flag" else origin
        if flag.is_switch and not _is_whole_number(value):
            raise ConfigError(shown, value, "expected 0 or 1")
        if flag.choices and value not in flag.choices:
            raise ConfigError(shown, value, f"expected one of {', '.join(flag.choices)}")
        values[flag.dest], origins[flag.dest] = value, origin
    return values, origins


def _is_whole_number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True
