"""Degrees of parallelism as a grid of ranks. Pure.

The axes, outermost first:

- ``pp``: pipeline stages;
- ``dp``: replicas of the model, which see different data;
- ``cp``: parts of one sequence (context parallel);
- ``tp``: parts of one layer (tensor parallel). It has the most traffic, so its ranks are neighbours.

Experts (``ep``) are spread over the ranks of ``dp``: neighbouring replicas hold different experts, and each expert is
replicated along ``edp``. So ``dp`` equals ``edp`` times ``ep``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rallypoint._core.whole_numbers import is_whole
from rallypoint.errors import ConfigError


# The grid's axes, outermost first; "dp" is edp and ep together.
GRID = ("pp", "edp", "ep", "cp", "tp")
AXES = ("pp", "dp", "cp", "tp", "ep", "edp")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """The number of ranks along each axis, and the place of each rank in the grid.

    At most one of ``dp``, ``pp``, ``cp`` and ``tp`` may be -1, which stands for the rest of the world
    (:meth:`resolve`).

    Args:
        dp: number of replicas of the model. Default: the rest; 1 if another degree is -1.
        pp: number of pipeline stages.
        cp: number of parts of a sequence.
        tp: number of parts of a layer.
        ep: number of expert groups, a divisor of ``dp``. -1: equal to ``dp``.

    Raises:
        ConfigError: a degree is not a whole number of at least 1 (or -1), several are -1, or ``ep`` does not divide ``dp``.
    """

    dp: int | None = None
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.dp is None:
            object.__setattr__(self, "dp", 1 if -1 in (self.pp, self.cp, self.tp) else -1)
        degrees = self._degrees()
        every: dict[str, object] = {**degrees, "ep": self.ep}
        for axis, degree in every.items():
            if not is_whole(degree) or (degree != -1 and degree < 1):  # type: ignore[operator]  # it is an int
                raise ConfigError(
                    axis, degree, "expected a whole number, 1 or more, or -1 for the rest"
                )
        rest = [axis for axis, degree in degrees.items() if degree == -1]
        if len(rest) > 1:
            raise ConfigError(
                rest[1], -1, f"only one degree may be -1, and {rest[0]} is -1 already"
            )
        if not rest:
            self._check_ep()

    def _degrees(self) -> dict[str, int]:
        assert self.dp is not None
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    def _check_ep(self) -> None:
        assert self.dp is not None
        if self.ep != -1 and self.dp % self.ep:
            raise ConfigError(
                "ep",
                self.ep,
                f"expected a divisor of dp, which is {self.dp}: {_listed(_divisors(self.dp))}",
            )

    def resolve(self, world_size: int) -> ParallelLayout:
        """Replace -1 with the actual degree.

        Args:
            world_size: number of ranks in the job.

        Returns:
            The layout of this many ranks, without any -1.

        Raises:
            ConfigError: the product of the degrees is not ``world_size``, or does not divide it; the message lists some that fit.
        """
        _check_whole("world_size", world_size)
        degrees = self._degrees()
        given = {axis: degree for axis, degree in degrees.items() if degree != -1}
        product = math.prod(given.values())
        rest = next((axis for axis, degree in degrees.items() if degree == -1), None)
        if world_size < 1 or world_size % product or (rest is None and product != world_size):
            raise ConfigError("world_size", world_size, *_misfit(world_size, given, rest is None))
        if rest is not None:
            degrees[rest] = world_size // product
        return replace(self, **degrees, ep=degrees["dp"] if self.ep == -1 else self.ep)

    @property
    def resolved(self) -> bool:
        """Whether no degree is -1."""
        return -1 not in {*self._degrees().values(), self.ep}

    @property
    def world_size(self) -> int:
        """Number of ranks.

        Raises:
            ConfigError: a degree is -1.
        """
        return math.prod(self._sizes().values())

    def degree(self, *axes: str) -> int:
        """Number of ranks along one axis, or along several joined.

        Args:
            axes: names from :data:`AXES`.

        Returns:
            The product of the axes' degrees.

        Raises:
            ConfigError: an axis is unknown or named twice (``dp`` includes ``ep``), or a degree is -1.
        """
        sizes = self._sizes()
        return math.prod(sizes[axis] for axis in _grid_axes(axes))

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """A rank's position along each of :data:`AXES`.

        Args:
            rank: a global rank.

        Returns:
            The rank's index along each axis, counted from 0.

        Raises:
            ConfigError: ``rank`` is not in the layout, or a degree is -1.
        """
        _check_whole("rank", rank)
        if not 0 <= rank < self.world_size:
            raise ConfigError("rank", rank, f"expected 0 to {self.world_size - 1}")
        found, left = {}, rank
        for axis, size in reversed(self._sizes().items()):
            left, found[axis] = divmod(left, size)
        found["dp"] = found["edp"] * self.ep + found["ep"]
        return {axis: found[axis] for axis in AXES}

    def rank_at(self, *, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at a position in the grid.

        Args:
            dp, pp, cp, tp: the index along each axis, counted from 0.

        Returns:
            The global rank.

        Raises:
            ConfigError: an index is outside the grid, or a degree is -1.
        """
        for axis, index in (("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)):
            _check_whole(axis, index)
            if not 0 <= index < self.degree(axis):
                raise ConfigError(axis, index, f"expected 0 to {self.degree(axis) - 1}")
        return ((pp * self.degree("dp") + dp) * self.cp + cp) * self.tp + tp

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along these axes.

        Args:
            rank: a global rank.
            axes: names from :data:`AXES`.

        Returns:
            Global ranks in ascending order, ``rank`` included.

        Raises:
            ConfigError: ``rank`` is not in the layout, an axis is unknown or named twice (``dp`` includes ``ep``), or a
                degree is -1.
        """
        along, here = _grid_axes(axes), self.coordinates(rank)
        first = rank - sum(here[axis] * stride for axis, (_, stride) in self._grid(along).items())
        return tuple(first + each for each in self._offsets(along))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups along these axes.

        Args:
            axes: names from :data:`AXES`.

        Returns:
            Each group as global ranks in ascending order. Every rank is in exactly one group.

        Raises:
            ConfigError: as :meth:`peers`.
        """
        along = _grid_axes(axes)
        offsets = self._offsets(along)
        firsts = self._offsets(tuple(axis for axis in GRID if axis not in along))
        return tuple(tuple(first + each for each in offsets) for first in firsts)

    def _offsets(self, along: tuple[str, ...]) -> list[int]:
        """The ranks reached from rank 0 along these axes of the grid."""
        steps = [range(0, size * stride, stride) for size, stride in self._grid(along).values()]
        return [sum(each) for each in itertools.product(*steps)]

    def _grid(self, along: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """The size of each of these axes, and the distance in ranks between its neighbours; outermost first."""
        found, stride = {}, 1
        for axis, size in reversed(self._sizes().items()):
            found[axis] = (size, stride)
            stride *= size
        return {axis: found[axis] for axis in GRID if axis in along}

    def _sizes(self) -> dict[str, int]:
        if not self.resolved:
            raise ConfigError("world_size", None, "a degree is -1: call resolve(world_size) first")
        assert self.dp is not None
        return dict(
            zip(GRID, (self.pp, self.dp // self.ep, self.ep, self.cp, self.tp), strict=True)
        )


def _check_whole(name: str, value: object) -> None:
    if not is_whole(value):
        raise ConfigError(name, value, "expected a whole number")


def _grid_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for axis in axes:
        if axis not in AXES:
            raise ConfigError("axis", axis, f"expected one of {', '.join(AXES)}")
        for part in ("edp", "ep") if axis == "dp" else (axis,):
            if part in found:
                raise ConfigError("axes", axes, f"{part} occurs twice (dp is edp times ep)")
            found.append(part)
    if not found:
        raise ConfigError("axes", axes, f"expected at least one of {', '.join(AXES)}")
    return tuple(found)


def _misfit(world_size: int, given: Mapping[str, int], exact: bool) -> tuple[str, str]:
    """What is wrong, and which single degrees could be changed to fix it."""
    used = {axis: degree for axis, degree in given.items() if degree > 1}
    product = math.prod(used.values())
    shown = " x ".join(f"{axis}={degree}" for axis, degree in used.items()) or "1"
    if len(used) > 1:
        shown += f" = {product}"
    wanted = "expected" if exact else "expected a multiple of"
    ways = []
    for axis, degree in given.items():
        others = product // degree
        if world_size < 1 or world_size % others:
            continue
        fitting = [world_size // others] if exact else _divisors(world_size // others)
        ways.append(f"{axis} of {_listed(fitting)}")
    return f"{wanted} {shown}", f"would fit: {'; or '.join(ways)}" if ways else ""


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _listed(numbers: list[int]) -> str:
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last}" if rest else last
