"""Which lines of a job's output are shown, in what order and form. Pure."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rallypoint._core.log_records import Line


_COLOURS = (36, 33, 32, 35, 34, 31)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which lines are wanted.

    Args:
        ranks: only lines of these ranks; empty: all.
        pattern: only lines that match it; None: all.
        tail: only this many last lines of each stream of each worker; None: all.
        since: only lines from this time on, in seconds since 1970, and lines without a time; None: all.
    """

    ranks: frozenset[int] = frozenset()
    pattern: re.Pattern[str] | None = None
    tail: int | None = None
    since: float | None = None

    def takes(self, line: Line) -> bool:
        """Whether a line is wanted. Ignores ``tail``."""
        if self.ranks and line.origin.rank not in self.ranks:
            return False
        if self.since is not None and line.time is not None and line.time < self.since:
            return False
        return self.pattern is None or self.pattern.search(line.text) is not None

    def of(self, stream: Iterable[Line]) -> Iterator[Line]:
        """The wanted lines of one stream of one worker."""
        wanted = (line for line in stream if self.takes(line))
        return wanted if self.tail is None else iter(deque(wanted, self.tail))


def in_order(streams: Sequence[Iterator[Line]]) -> Iterator[Line]:
    """The lines of one host: those with a time sorted by time, those without one stream after the other.

    Times are by the monotonic clock, so setting the system's clock does not change the order.
    """
    # A line without a time stays with the line before it.
    return (line for _, _, line in heapq.merge(*map(_timed, range(len(streams)), streams)))


def _timed(place: int, stream: Iterator[Line]) -> Iterator[tuple[float, _Place, Line]]:
    at = float("-inf")
    for number, line in enumerate(stream):
        at = at if line.monotonic is None else max(at, line.monotonic)
        yield at, (place, number), line


_Place = tuple[int, int]


def shown(line: Line, *, colour: bool) -> str:
    """A line, marked with the rank that wrote it."""
    origin = line.origin
    who = f"rank {origin.rank}" if origin.rank >= 0 else f"local rank {origin.local_rank}"
    mark = f"[{who}{' err' if origin.stream == 'stderr' else ''}]"
    if colour:
        code = _COLOURS[max(origin.rank, origin.local_rank) % len(_COLOURS)]
        mark = f"\x1b[{code}m{mark}\x1b[0m"
    return f"{mark} {line.text}"
