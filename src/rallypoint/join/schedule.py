"""Which ranks have inputs in which step, and how their gradients are weighted. Pure.

A rank *runs out* after its last step. From then on it only matches the other ranks' steps. The weighting says how the
ranks' gradients are combined in a step. With ``g`` the gradient of a rank's mean loss, ``n`` its number of samples in
the step, ``W`` the number of ranks, and ``k`` the number of ranks that still have inputs:

- ``"initial"``: ``sum(g) / W``; a rank that has run out counts with a gradient of zero;
- ``"ranks"``: ``sum(g) / k``;
- ``"samples"``: ``sum(n * g) / sum(n)``, the gradient of one process that has all the samples.

The collectives divide by ``W``, so each rank first multiplies its own gradient by a factor.
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
    """One rank's inputs.

    Args:
        runs: pairs ``(steps, samples)`` in order: this many steps with this many samples each. None: samples unknown.
    """

    runs: tuple[tuple[int, int | None], ...]

    @classmethod
    def of_steps(cls, steps: int) -> Inputs:
        """This many steps, with unknown numbers of samples."""
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
    """A run of steps, from ``start`` on, in which the ranks with inputs and their numbers of samples stay the same."""

    start: int
    active: int
    samples: int


class Schedule:
    """All ranks' inputs, as every rank of the group knows them.

    Args:
        inputs: each rank's inputs, in rank order.
        weighting: how gradients are combined; see the module's docstring.

    Raises:
        ConfigError: the weighting is unknown, or is ``"samples"`` while some rank does not know its numbers of samples.
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
                f"rank {', '.join(map(str, unknown))} does not know the number of samples in each step",
                "pass steps=<list of samples per step> or a DataLoader without samples= to Join, or leave out steps= and"
                " iterate over join.batches(loader)",
            )
        self.inputs = tuple(inputs)
        self.weighting: Weighting = weighting
        self.steps = tuple(each.steps for each in inputs)
        self.world_size = len(self.inputs)
        self.total = max(self.steps, default=0)
        self.least = min(self.steps, default=0)
        self._phases = _phases(self.inputs)
        self._starts = [phase.start for phase in self._phases]
        # Ranks sorted by their number of steps and, for each position, the highest rank from there on.
        self._by_end = sorted(range(self.world_size), key=lambda rank: self.steps[rank])
        self._ends = [self.steps[rank] for rank in self._by_end]
        self._highest = list(itertools.accumulate(reversed(self._by_end), max))[::-1]
        self._own = [list(itertools.accumulate(n for n, _ in each.runs)) for each in inputs]

    @property
    def even(self) -> bool:
        """Whether all ranks run out together."""
        return self.least == self.total

    def is_active(self, rank: int, step: int) -> bool:
        return step < self.steps[rank]

    def num_active(self, step: int) -> int:
        """The number of ranks that have inputs in this step."""
        return self.world_size - bisect_right(self._ends, step)

    def samples(self, rank: int, step: int) -> int | None:
        """The rank's number of samples in this step; 0 once it has run out, None if unknown."""
        runs = self.inputs[rank].runs
        at = bisect_right(self._own[rank], step)
        return 0 if at == len(runs) else runs[at][1]

    def source(self, step: int) -> int:
        """The rank whose buffers are used in this step: the highest rank that has inputs.

        Once all ranks have run out, the highest of the ranks with the most steps.
        """
        step = min(step, self.total - 1)
        first = bisect_right(self._ends, step)
        return self._highest[first] if first < self.world_size else self.world_size - 1

    def factor(self, rank: int, step: int) -> float:
        """The factor for the rank's gradient in this step, before the mean over all ranks."""
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
        """The next step, from ``step`` on, in which the rank's factor may change, its inputs end, or the block ends."""
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
    """The phases in order, up to the last step of any rank."""
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
