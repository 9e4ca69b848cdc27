"""The generations of a job, as this node has seen them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


# Only the last ones are kept: an elastic job may go on for weeks.
MOST = 100


@dataclass(slots=True)
class _Generation:
    generation: int
    began: float
    world_size: int
    ended: float | None = None
    failed_ranks: tuple[int, ...] = ()
    cause: str = ""


class JobHistory:
    """Remembers when generations began and ended, in seconds since the job began."""

    def __init__(self) -> None:
        self._generations: deque[_Generation] = deque(maxlen=MOST)

    def begin(self, generation: int, now: float, world_size: int) -> None:
        self._generations.append(_Generation(generation, now, world_size))

    def end(self, now: float, failed_ranks: Sequence[int], cause: str) -> None:
        """Note the end of the last one, with the ranks that failed on this node and why the first of them did."""
        if self._generations:
            last = self._generations[-1]
            last.ended, last.failed_ranks, last.cause = now, tuple(failed_ranks), cause

    def told(self) -> list[dict[str, Any]]:
        """The generations as ``rally ps --json`` shows them."""
        return [asdict(each) for each in self._generations]
