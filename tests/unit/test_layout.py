"""Degrees of parallelism as a grid of ranks, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.parallel.layout import AXES, ParallelLayout


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def layouts(world: int) -> list[tuple[int, int, int, int, int]]:
    """Every (pp, dp, cp, tp, ep) for that many ranks."""
    return [
        (pp, dp, cp, tp, ep)
        for pp in divisors(world)
        for dp in divisors(world // pp)
        for cp in divisors(world // pp // dp)
        for tp in [world // pp // dp // cp]
        for ep in divisors(dp)
    ]


# Larger worlds have more factorizations, not different ones.
WORLDS = [
    each if each <= 24 or each in {30, 32, 64} else pytest.param(each, marks=pytest.mark.long)
    for each in range(1, 65)
]


@pytest.mark.parametrize("world", WORLDS)
def test_every_factorisation_is_what_counting_by_hand_gives(world: int) -> None:
    for pp, dp, cp, tp, ep in layouts(world):
        layout = ParallelLayout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
        assert layout.world_size == world
        # Ranks are assigned in nested loops, tp innermost.
        place = {}
        for rank, (a, b, c, d) in enumerate(
            itertools.product(range(pp), range(dp), range(cp), range(tp))
        ):
            place[rank] = {"pp": a, "dp": b, "cp": c, "tp": d, "ep": b % ep, "edp": b // ep}
        for rank, here in place.items():
            assert dict(layout.coordinates(rank)) == here
            grid = {axis: here[axis] for axis in ("pp", "dp", "cp", "tp")}
            assert layout.rank_at(**grid) == rank
        for axes in [(axis,) for axis in AXES] + [("dp", "cp"), ("tp", "cp", "dp"), ("pp", "ep")]:
            moved = {"ep", "edp"} if "dp" in axes else set()
            moved |= set(axes) - {"dp"}
            fixed = {"pp", "cp", "tp", "ep", "edp"} - moved
            by_place: dict[tuple[int, ...], list[int]] = {}
            for rank, here in place.items():
                by_place.setdefault(tuple(here[axis] for axis in sorted(fixed)), []).append(rank)
            expected = {tuple(group) for group in by_place.values()}
            assert set(layout.groups(*axes)) == expected
            assert len(layout.groups(*axes)) * layout.degree(*axes) == world
            rank = world // 2
            assert rank in layout.peers(rank, *axes)
            assert layout.peers(rank, *axes) in expected


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.data())
def test_one_degree_may_be_left_to_the_rest(
    pp: int, dp: int, cp: int, tp: int, data: st.DataObject
) -> None:
    world = pp * dp * cp * tp
    degrees = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    rest = data.draw(st.sampled_from(sorted(degrees)))
    layout = ParallelLayout(**{**degrees, rest: -1})
    assert not layout.resolved
    found = layout.resolve(world)
    assert {axis: found.degree(axis) for axis in degrees} == degrees
    assert found.resolve(world) == found


def test_what_is_left_is_data_parallel_unless_another_degree_takes_it() -> None:
    assert ParallelLayout(tp=2).resolve(8) == ParallelLayout(dp=4, tp=2)
    assert ParallelLayout(tp=-1).resolve(8) == ParallelLayout(dp=1, tp=8)
    assert ParallelLayout(ep=-1).resolve(8) == ParallelLayout(dp=8, ep=8)


def test_neighbours_are_tensor_parallel() -> None:
    layout = ParallelLayout(pp=2, dp=2, tp=2)
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.peers(5, "dp") == (5, 7)


@pytest.mark.parametrize(
    ("degrees", "world", "text"),
    [
        (
            {"tp": 5},
            12,
            "world_size 12: expected a multiple of tp=5 (would fit: tp of 1, 2, 3, 4, 6 or 12)",
        ),
        ({"dp": 3, "tp": 2}, 8, "expected dp=3 x tp=2 = 6 (would fit: dp of 4)"),
        (
            {"dp": 2},
            8,
            "expected dp=2 (would fit: pp of 4; or dp of 8; or cp of 4; or tp of 4)",
        ),
        ({"pp": 2, "tp": 4}, 12, "tp of 1, 2, 3 or 6)"),
        ({"pp": 2}, 0, "world_size 0: expected a multiple of pp=2"),
    ],
)
def test_a_world_that_does_not_divide_is_told_what_would_go(
    degrees: dict[str, int], world: int, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelLayout(**degrees).resolve(world)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({"tp": 0}, "tp 0: expected a whole number, 1 or more, or -1"),
        ({"tp": True}, "tp True: expected a whole number"),
        ({"pp": 2.0}, "pp 2.0: expected a whole number"),
        ({"tp": -1, "dp": -1}, "tp -1: only one degree may be -1, and dp is"),
        ({"dp": 6, "ep": 4}, "ep 4: expected a divisor of dp, which is 6: 1, 2, 3 or 6"),
    ],
)
def test_a_degree_that_cannot_be(degrees: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelLayout(**degrees)
    assert text in str(caught.value)


def test_experts_that_do_not_divide_what_is_left_are_found_when_it_is_known() -> None:
    with pytest.raises(ConfigError, match="ep 3: expected a divisor of dp, which is 4"):
        ParallelLayout(ep=3, tp=2).resolve(8)


def test_places_that_are_not_there() -> None:
    layout = ParallelLayout(dp=2, tp=2)
    for call in (
        lambda: layout.coordinates(4),
        lambda: layout.rank_at(dp=2),
        lambda: layout.peers(0, "mp"),
        lambda: layout.peers(0, "dp", "ep"),
        lambda: layout.groups(),
        lambda: ParallelLayout().coordinates(0),
    ):
        with pytest.raises(ConfigError):
            call()
