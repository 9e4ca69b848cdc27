"""Values of one rank: which ones are accepted, and that they come back unchanged."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.elastic.loops import rng
from rallypoint.elastic.loops.local_values import LIMIT, LocalValues
from rallypoint.elastic.loops.own_state import OwnState, Place
from rallypoint.errors import ElasticError


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), PLAIN, max_size=4))
def test_what_is_taken_comes_back_as_it_was(values: dict[str, object]) -> None:
    local, other = LocalValues(), LocalValues(old=1)
    for key, value in values.items():
        local[key] = value
    other.restore(local.pack())
    assert other == local == values
    assert repr(other) == repr(local), "types, and signs of zero"


def test_numbers_that_are_none_come_back() -> None:
    local = LocalValues()
    local["x"] = [math.nan, math.inf]
    local.restore(local.pack())
    assert math.isnan(local["x"][0]) and local["x"][1] == math.inf


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("x", torch.zeros(1), r"session.local\['x'\] is a Tensor, expected None"),
        ("x", {"a": [1, (2,)]}, r"session.local\['x'\]\['a'\]\[1\] is a tuple"),
        ("x", {1: 2}, r"session.local\['x'\]\[1\]: the key is a int, expected a str"),
        (7, 1, "the key is a int"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_at_once(
    key: str, value: object, said: str
) -> None:
    local = LocalValues()
    for put in (
        lambda: local.__setitem__(key, value),
        lambda: local.setdefault(key, value),
        lambda: local.update({key: value}),
        lambda: local.__ior__({key: value}),
    ):
        with pytest.raises(ElasticError, match=said):
            put()
    assert not local


def test_what_is_put_in_later_is_refused_before_it_is_kept() -> None:
    local = LocalValues()
    local["x"] = []
    local["x"].append({3})
    with pytest.raises(ElasticError, match=r"session.local\['x'\]\[0\] is a set"):
        local.pack()
    local["x"] = "x" * LIMIT
    with pytest.raises(ElasticError, match="at most 16,384 are kept with each step; .* is 'x'"):
        local.pack()


def test_they_are_part_of_a_rank_s_own_state() -> None:
    local = LocalValues()
    local["n"] = 1
    rng.keep_local(local)
    try:
        before = rng.RandomState.now()
        assert rng.RandomState.now() is before
        local["n"] = 2
        after = rng.RandomState.now()
        assert not after.equals(before)
        random.random()
        own = OwnState.unpack(OwnState(3, Place(), before, later=after).pack())
        own.random.restore()
        assert local == {"n": 1}
        assert own.later is not None
        own.later.restore()
        assert local == {"n": 2}
    finally:
        rng.keep_local(None)
    assert rng.RandomState.now().local == b""
