"""The list of hosts to avoid, as text: people write names into it, and rally writes what happened to hosts. Pure.

    # a comment
    node9                                                     put there by a person: avoided
    node7 lost 2026-11-26T11:30:14Z 3f9c2a71 its process has ended unexpectedly
    node7 failed 2026-11-26T12:10:02Z 9a0be412 rank 12 was killed by SIGBUS

A host with two lines that name different incidents is avoided, until somebody removes them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rallypoint.errors import ConfigError
from rallypoint.launch.output.report import clean

from .trouble import Kind, Trouble


# How often a host must be lost or fail to be avoided: once is chance.
TIMES = 2
_MAX_WHY = 200
_HOST = re.compile(r"[^\s#,]+")


@dataclass(frozen=True, slots=True)
class AvoidList:
    """The hosts that a list names.

    Args:
        by_hand: those that are alone on their line.
        troubles: what happened to hosts, in the order of the list.
    """

    by_hand: tuple[str, ...] = ()
    troubles: tuple[Trouble, ...] = ()

    def reason(self, host: str) -> str:
        """Why a host is to be avoided; empty: it is not."""
        if any(is_same(host, each) for each in self.by_hand):
            return "it is on the list"
        found = self._incidents(host)
        if len(found) < TIMES:
            return ""
        return f"it {_times(found)}, last: {found[-1].why or 'no reason given'}"

    def hosts(self) -> tuple[str, ...]:
        """All hosts to be avoided, by the name that came first."""
        found: list[str] = []
        for name in (*self.by_hand, *(each.host for each in self.troubles)):
            if self.reason(name) and not any(is_same(name, each) for each in found):
                found.append(name)
        return tuple(found)

    def missing(self, troubles: Iterable[Trouble]) -> tuple[Trouble, ...]:
        """The troubles that the list does not have yet."""
        found: list[Trouble] = []
        for each in troubles:
            known = (*self.troubles, *found)
            if not any(_is_known(each, other) for other in known):
                found.append(each)
        return tuple(found)

    def _incidents(self, host: str) -> list[Trouble]:
        """What happened to a host, once for each incident."""
        found: dict[str, Trouble] = {}
        for each in self.troubles:
            if is_same(host, each.host):
                found.setdefault(each.incident, each)
        return list(found.values())


def parse(text: str, shown: str) -> AvoidList:
    """Read a list.

    Args:
        text: the file's text.
        shown: what the file is called in errors.

    Raises:
        ConfigError: a line is neither a host nor a record. (The last line may be incomplete: it may be being written.)
    """
    by_hand: list[str] = []
    troubles: list[Trouble] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) == 1 or words[1].startswith("#"):
            if not _HOST.fullmatch(words[0]):
                raise _no_record(shown, number, line)
            by_hand.append(words[0])
        elif len(words) >= 4 and words[1] in set(Kind):
            troubles.append(
                Trouble(
                    host=words[0],
                    kind=Kind(words[1]),
                    incident=words[3],
                    why=" ".join(words[4:]),
                )
            )
        elif number < len(lines):
            raise _no_record(shown, number, line)
    return AvoidList(tuple(by_hand), tuple(troubles))


def _no_record(shown: str, number: int, line: str) -> ConfigError:
    hint = "a host alone on its line is avoided; what follows # is a comment"
    return ConfigError(
        shown, clean(line)[:80], f"line {number} is neither a host nor a record of rally", hint
    )


def lines_for(troubles: Sequence[Trouble], when: str) -> str:
    """The lines to append.

    Args:
        troubles: what happened.
        when: the time, for people; the list is not ordered by it.
    """
    return "".join(
        f"{each.host} {each.kind.value} {when} {each.incident}"
        f" {' '.join(clean(each.why).split())[:_MAX_WHY]}".rstrip()
        + "\n"
        for each in troubles
        if _HOST.fullmatch(each.host)
    )


def is_same(one: str, other: str) -> bool:
    """Whether two names belong to one host: ``node7`` and ``node7.cluster.example`` are."""
    one, other = one.casefold(), other.casefold()
    if one == other:
        return True
    if _is_address(one) or _is_address(other):
        return False
    short = one.split(".")[0] == other.split(".")[0]
    return short and ("." not in one or "." not in other)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_known(one: Trouble, other: Trouble) -> bool:
    return one.incident == other.incident and is_same(one.host, other.host)


def _times(troubles: Sequence[Trouble]) -> str:
    """``was lost 2 times``, ``was lost once and failed once``."""
    counts = {kind: sum(each.kind is kind for each in troubles) for kind in Kind}
    words = [
        f"{'was ' if kind is Kind.LOST else ''}{kind.value} {_count(count)}"
        for kind, count in counts.items()
        if count
    ]
    return " and ".join(words)


def _count(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
