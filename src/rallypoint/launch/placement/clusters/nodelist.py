"""Slurm's lists of hosts, expanded as ``scontrol show hostnames`` does, which containers seldom have. Pure."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from rallypoint.errors import ConfigError


# A node list longer than this is a typing mistake (`node[0-99999999]`), not a cluster.
_MAX_HOSTS = 1 << 20


class _Range(NamedTuple):
    low: int
    high: int
    width: int  # digits, with leading zeros: [008-010]

    def format(self, number: int) -> str:
        return str(number).zfill(self.width)


# `rack[1-2]-n[01,03-04]` is literal, ranges, literal, ranges.
_Entry = tuple[str | tuple[_Range, ...], ...]


def expand_nodelist(nodelist: str, *, variable: str = "nodelist") -> list[str]:
    """The hosts that a Slurm node list names, in its order.

    Args:
        nodelist: ``node[01-03,07],gpu-[1-2]-ib,login1``; several bracket groups in one name multiply.
        variable: where it came from, for the error.

    Raises:
        ConfigError: not such a list.
    """
    hosts: list[str] = []
    for entry in _parse_nodelist(nodelist, variable):
        columns = [
            [part]
            if isinstance(part, str)
            else [span.format(n) for span in part for n in range(span.low, span.high + 1)]
            for part in entry
        ]
        hosts += ["".join(pieces) for pieces in itertools.product(*columns)]
    return hosts


def first_host(nodelist: str, *, variable: str = "nodelist") -> str:
    """The first of :func:`expand_nodelist`; the whole list is checked all the same."""
    entry = _parse_nodelist(nodelist, variable)[0]
    return "".join(part if isinstance(part, str) else part[0].format(part[0].low) for part in entry)


def _parse_nodelist(nodelist: str, variable: str) -> list[_Entry]:
    def malformed(problem: str) -> ConfigError:
        return ConfigError(variable, nodelist, f"not a list of hosts: {problem}")

    entries: list[_Entry] = []
    total = 0
    # Commas that are not followed by a `]` before the next `[` separate entries.
    for text in re.split(r",(?![^\[]*\])", nodelist.strip()):
        if not re.fullmatch(r"(?:[^\[\],\s]|\[[0-9,-]+\])+", text):
            what = f"{text!r} has unbalanced or unexpected brackets" if text else "an empty name"
            raise malformed(what)
        entry: list[str | tuple[_Range, ...]] = []
        count = 1
        for group, literal in re.findall(r"\[([0-9,-]+)\]|([^\[\]]+)", text):
            if literal:
                entry.append(literal)
                continue
            spans: list[_Range] = []
            for item in group.split(","):
                match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item)
                if match is None:
                    raise malformed(f"{item!r} in {text!r} is not a number or a range")
                low, high = int(match[1]), int(match[2] or match[1])
                if low > high:
                    raise malformed(f"the range {item!r} in {text!r} runs backwards")
                spans.append(_Range(low, high, len(match[1])))
            count *= sum(span.high - span.low + 1 for span in spans)
            entry.append(tuple(spans))
        total += count
        if total > _MAX_HOSTS:
            raise malformed(f"more than {_MAX_HOSTS} hosts")
        entries.append(tuple(entry))
    return entries
