"""Which ranks have inputs when, and which steps count: compared with the definition, step by step."""

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.join.schedule import WEIGHTINGS, Inputs, Schedule


# For each rank, the samples of each of its steps; a rank may have none, and all may have the same.
worlds = st.lists(st.lists(st.integers(0, 5), max_size=9), min_size=1, max_size=6)


def schedule(world: list[list[int]], weighting: str = "initial") -> Schedule:
    return Schedule([Inputs.of_sizes(sizes) for sizes in world], weighting)  # type: ignore[arg-type]


@given(worlds)
def test_steps_and_samples_are_those_that_were_told(world: list[list[int]]) -> None:
    found = schedule(world)
    assert found.steps == tuple(map(len, world))
    assert found.total == max(map(len, world))
    assert found.least == min(map(len, world))
    assert found.even == (len(set(map(len, world))) == 1)
    for step in range(found.total + 2):
        active = [rank for rank, sizes in enumerate(world) if step < len(sizes)]
        assert [r for r in range(len(world)) if found.is_active(r, step)] == active
        for rank, sizes in enumerate(world):
            assert found.samples(rank, step) == (sizes[step] if step < len(sizes) else 0)


@given(worlds)
def test_buffers_come_from_the_highest_rank_that_has_inputs(world: list[list[int]]) -> None:
    found = schedule(world)
    for step in range(found.total):
        assert found.source(step) == max(r for r, sizes in enumerate(world) if step < len(sizes))
    last = [r for r, sizes in enumerate(world) if len(sizes) == found.total]
    assert found.source(found.total) == found.source(found.total + 7) == max(last)


@given(worlds, st.sampled_from(WEIGHTINGS))
def test_factors_make_the_mean_over_all_ranks_what_the_weighting_says(
    world: list[list[int]], weighting: str
) -> None:
    found, size = schedule(world, weighting), len(world)
    for step in range(found.total):
        factors = [found.factor(rank, step) for rank in range(size)]
        sizes = [each[step] if step < len(each) else None for each in world]
        active = [n for n in sizes if n is not None]
        samples = sum(active)
        for factor, n in zip(factors, sizes, strict=True):
            if n is None:
                expected = 0.0
            elif weighting == "initial":
                expected = 1 / size
            elif weighting == "ranks":
                expected = 1 / len(active)
            else:
                expected = n / samples if samples else 0.0
            assert factor / size == pytest.approx(expected)


@given(worlds, st.sampled_from(WEIGHTINGS), st.booleans())
def test_nothing_changes_while_it_is_calm(
    world: list[list[int]], weighting: str, throws: bool
) -> None:
    found = schedule(world, weighting)
    for rank in range(len(world)):
        for step in range(found.total):
            until = found.calm_until(rank, step, throws=throws)
            assert until >= step
            assert until > step or not found.is_active(rank, step) or throws
            for later in range(step, until):
                assert found.is_active(rank, later)
                assert found.factor(rank, later) == found.factor(rank, step)
                assert not throws or found.even or later < found.least


@given(worlds, st.integers(0, 9))
def test_unknown_samples_are_no_hindrance_unless_they_are_the_weights(
    world: list[list[int]], who: int
) -> None:
    inputs = [Inputs.of_sizes(sizes) for sizes in world]
    rank = who % len(world)
    inputs[rank] = Inputs.of_steps(len(world[rank]) + 1)
    known, unknown = schedule(world, "ranks"), Schedule(inputs, "ranks")
    assert unknown.steps[rank] == known.steps[rank] + 1
    assert unknown.samples(rank, 0) is None
    with pytest.raises(ConfigError, match=f"rank {rank} does not know.*join.batches"):
        Schedule(inputs, "samples")


def test_a_million_steps_take_no_room() -> None:
    found = Schedule([Inputs(((10**9, 32), (1, 7))), Inputs(((10**9 - 1, 32),))], "samples")
    assert found.factor(0, 5) == 1.0
    assert found.factor(0, 10**9) == 2.0
    assert found.factor(1, 10**9 - 1) == 0.0


def test_an_unknown_weighting_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="weighting 'mean': expected one of 'initial', 'ranks', 'samples'"
    ):
        Schedule([Inputs.of_steps(1)], "mean")  # type: ignore[arg-type]
