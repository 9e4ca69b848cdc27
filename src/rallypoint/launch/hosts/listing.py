"""The hosts of ``--hosts`` and ``--hostfile``: pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rallypoint.errors import ConfigError


# An address in brackets, perhaps after a user's name.
_IPV6 = re.compile(r"(?:[^@\[\]]+@)?\[[^\[\]]*:[^\[\]]*\]")


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the job.

    Args:
        name: as ssh takes it: a name, an address, ``user@name``, an alias of its configuration.
        workers: how many it is to run; None: as ``--nproc-per-node`` says.
    """

    name: str
    workers: int | None = None

    @property
    def bare(self) -> str:
        """Its name without the user."""
        return self.name.rpartition("@")[2]


def read_list(text: str, shown: str = "--hosts") -> tuple[Host, ...]:
    """``a,b:8,[fd00::1]:8``.

    Raises:
        ConfigError: an item is empty or not a host, or one is named twice. A comma may follow the last one.
    """
    items = [item.strip() for item in text.split(",")]
    if not items[-1]:
        items.pop()
    if not all(items):
        raise ConfigError(
            shown, text, "one of the names is empty", "is a variable of the shell not set?"
        )
    return _checked([_host(item, shown) for item in items], shown)


def read_file(lines: Sequence[str], shown: str) -> tuple[Host, ...]:
    """One host per line: ``a``, ``a:8`` (MPICH) or ``a slots=8`` (Open MPI); ``#`` starts a comment.

    Raises:
        ConfigError: a line is not a host, or one is named twice.
    """
    found = []
    for line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words[0], shown)
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name == "slots":
                host = Host(host.name, _number(value, word, shown))
        found.append(host)
    return _checked(found, shown)


@dataclass(frozen=True, slots=True)
class Selection:
    """The hosts of a job, when some are to be avoided.

    Args:
        hosts: those that take part.
        left_out: those that are to be avoided, with the reason.
        nnodes: for ``--nnodes``; None: as many as take part.
    """

    hosts: tuple[Host, ...]
    left_out: tuple[tuple[str, str], ...]
    nnodes: str | None


def select(
    hosts: Sequence[Host], reason: Callable[[str], str], nnodes: str | None, shown: str
) -> Selection:
    """The first hosts that need not be avoided: as many as ``--nnodes`` asks for, or all of them.

    Args:
        hosts: those listed.
        reason: why a host is to be avoided; empty: it is not.
        nnodes: ``--nnodes`` of the command line.
        shown: the list of those to be avoided, for errors.

    Raises:
        ConfigError: too few are left.
    """
    why = {each.name: reason(each.bare) for each in hosts}
    left_out = tuple((each.bare, why[each.name]) for each in hosts if why[each.name])
    usable = tuple(each for each in hosts if not why[each.name])
    fewest, most = _range_of(nnodes) if nnodes is not None else (1, len(usable))
    if len(usable) < fewest:
        needs = "" if nnodes is None else f", and --nnodes needs {fewest}"
        hint = "remove the lines of hosts that work again, or name more hosts"
        problem = f"leaves {len(usable)} of {len(hosts)} hosts{needs}"
        raise ConfigError("--avoid-hosts", shown, problem, hint)
    chosen = usable[:most]
    if nnodes is not None:
        nnodes = f"{fewest}:{len(chosen)}" if fewest < most else str(fewest)
    return Selection(chosen, left_out, nnodes)


def _range_of(nnodes: str) -> tuple[int, int]:
    least, _, most = nnodes.partition(":")
    numbers = [each for each in (least, most or least) if each.isascii() and each.isdigit()]
    if len(numbers) < 2 or not 1 <= int(least) <= int(most or least):
        raise ConfigError("--nnodes", nnodes, "expected N or MIN:MAX")
    return int(least), int(most or least)


def _host(item: str, shown: str) -> Host:
    name, colon, number = item.rpartition(":")
    if not colon or item.endswith("]") or (":" in name and not name.endswith("]")):
        name, number = item, ""  # a name alone; or an IPv6 address, whose colons are its own
    if ("[" in name or "]" in name) and not _IPV6.fullmatch(name):
        raise ConfigError(
            shown,
            item,
            "brackets are only for an IPv6 address, and ranges are not expanded",
            'for Slurm\'s lists: --hosts "$(scontrol show hostnames | paste -sd,)"',
        )
    host = name.replace("[", "").replace("]", "")
    # ssh would take a name that starts with a dash for an option.
    if not host or host.startswith("-") or any(each.isspace() for each in host):
        raise ConfigError(shown, item, "expected HOST or HOST:WORKERS")
    return Host(host, _number(number, item, shown) if number else None)


def _number(text: str, item: str, shown: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(shown, item, "expected a number of workers, 1 or more")
    return int(text)


def _checked(hosts: Sequence[Host], shown: str) -> tuple[Host, ...]:
    if not hosts:
        raise ConfigError(shown, None, "names no host", f"{shown} a,b:8")
    names = [each.name for each in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        hint = f"one supervisor runs all workers of a host: {twice}:{names.count(twice)}"
        raise ConfigError(shown, twice, "named twice", hint)
    return tuple(hosts)
