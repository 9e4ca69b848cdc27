"""Which ranks have inputs in which step, and how much each of them counts: pure.

A rank *runs out* after its last step; until the last rank has, it only keeps the others company. What a step's
gradient shall be is its weighting. With ``g`` the gradient of a rank's mean loss, ``n`` its samples in this
step, ``W`` the number of ranks and ``k`` of those that have inputs still:

- ``"initial"``: ``sum(g) / W``: a rank that has run out counts as a gradient of zero;
- ``"ranks"``: ``sum(g) / k``;
- ``"samples"``: ``sum(n * g) / sum(n)``, the gradient of one process that has all the samples.

The collectives divide by ``W``; so each rank multiplies its own gradient by a factor before.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rallypoint.errors import ConfigError


Weighting = Literal["initial", "ranks", "samples"]
WEIGHTINGS: tuple[str, ...] = get_args(Weighting)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one rank has.

    Args:
        runs: steps in their order, as pairs: so many steps with so many samples each; None where nobody knows.
    """

    runs: tuple[tuple[int, int | None], ...]

    @classmethod
    def of_steps(cls, steps: int) -> Inputs:
        """So many steps of unknown size."""
        return cls(((steps, None),) if steps else ())

    @classmethod
    def of_sizes(cls, sizes: Iterable[int]) -> Inputs:
        """One step for each size."""
        return cls(tuple((len(list(same)), size) for size, same in itertools.groupby(sizes)))

    @property
    def steps(self) -> int:
        return sum(steps for steps, _ in self.runs)

    @property
    def counted(self) -> bool:
        """Whether the samples of every step are known."""
        return all(size is not None for _, size in self.runs)


@dataclass(frozen=True, slots=True)
class _Phase:
    """Steps in which nothing changes: from ``start`` on."""

    start: int
    active: int
    samples: int


class Schedule:
    """What every rank of the group knows of all: the same on each of them.

    Args:
        inputs: of each rank, in rank order.
        weighting: see the module.

    Raises:
        ConfigError: no such weighting, or ``"samples"`` without their numbers.
    """

    def __init__(self, inputs: Sequence[Inputs], weighting: Weighting = "initial") -> None:
        if weighting not in WEIGHTINGS:
            raise ConfigError(
                "weighting", weighting, f"expected one of {', '.join(map(repr, WEIGHTINGS))}"
            )
        unknown = [rank for rank, each in enumerate(inputs) if not each.counted]
        if weighting == "samples" and unknown:
            raise ConfigError(
                "weighting",
                weighting,
                f"nobody knows how many samples the steps of rank {', '.join(map(str, unknown))} have",
                "give Join steps=[samples of each step], a DataLoader, or lookahead=8 with join.batches(loader)",
            )
        self.inputs = tuple(inputs)
        self.weighting: Weighting = weighting
        self.steps = tuple(each.steps for each in inputs)
        self.world_size = len(self.inputs)
        self.total = max(self.steps, default=0)
        self.least = min(self.steps, default=0)
        self._phases = _phases(self.inputs)
        self._starts = [phase.start for phase in self._phases]
        # Ranks by how long they have inputs, and the highest rank among the longest of them.
        self._by_end = sorted(range(self.world_size), key=lambda rank: self.steps[rank])
        self._ends = [self.steps[rank] for rank in self._by_end]
        self._highest = list(itertools.accumulate(reversed(self._by_end), max))[::-1]
        self._own = [list(itertools.accumulate(n for n, _ in each.runs)) for each in inputs]

    @property
    def even(self) -> bool:
        """Whether all run out together."""
        return self.least == self.total

    def is_active(self, rank: int, step: int) -> bool:
        return step < self.steps[rank]

    def num_active(self, step: int) -> int:
        """How many ranks have inputs in this step."""
        return self.world_size - bisect_right(self._ends, step)

    def samples(self, rank: int, step: int) -> int | None:
        """How many samples the rank has in this step; 0 once it has run out, None if nobody knows."""
        runs = self.inputs[rank].runs
        at = bisect_right(self._own[rank], step)
        return 0 if at == len(runs) else runs[at][1]

    def source(self, step: int) -> int:
        """Whose buffers count in this step: the highest of the ranks that have inputs.

        Once all have run out, the highest of those that had the most.
        """
        step = min(step, self.total - 1)
        first = bisect_right(self._ends, step)
        return self._highest[first] if first < self.world_size else self.world_size - 1

    def factor(self, rank: int, step: int) -> float:
        """By what the rank multiplies its gradient in this step, before the mean over all ranks."""
        if not self.is_active(rank, step):
            return 0.0
        if self.weighting == "initial":
            return 1.0
        phase = self._phases[bisect_right(self._starts, step) - 1]
        if self.weighting == "ranks":
            return self.world_size / phase.active
        own = self.samples(rank, step) or 0
        return self.world_size * own / phase.samples if own else 0.0

    def calm_until(self, rank: int, step: int, *, throws: bool) -> int:
        """From ``step`` on until this one nothing changes for the rank: its factor, whether it has inputs, who stops it."""
        if not self.is_active(rank, step):
            return step
        until = self.steps[rank]
        if throws and not self.even:
            until = min(until, self.least)
        if self.weighting != "initial":
            later = bisect_right(self._starts, step)
            until = min(until, self._starts[later] if later < len(self._starts) else self.total)
        return max(until, step)


def _phases(inputs: Sequence[Inputs]) -> list[_Phase]:
    """One after the other, up to the last step of all."""
    changes: dict[int, list[int]] = {}
    for each in inputs:
        start = 0
        for steps, size in each.runs:
            for at, sign in ((start, 1), (start + steps, -1)):
                change = changes.setdefault(at, [0, 0])
                change[0] += sign
                change[1] += sign * (size or 0)
            start += steps
    found, active, samples = [], 0, 0
    for start in sorted(changes):
        active += changes[start][0]
        samples += changes[start][1]
        found.append(_Phase(start, active, samples))
    return found
