"""Counts from many threads are exact, even while somebody reads them."""

import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis.strategies import lists, sampled_from

from rallypoint.rpc.agent.counters import Tally


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_no_addition_is_lost():
    tally = Tally()
    seen: list[list[int]] = [[] for _ in range(2)]

    def add() -> None:
        for _ in range(20_000):
            tally.add()

    def look(values: list[int]) -> None:
        values.extend(tally.value() for _ in range(2_000))

    threads = [threading.Thread(target=add) for _ in range(6)]
    threads += [threading.Thread(target=look, args=(each,)) for each in seen]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert tally.value() == 6 * 20_000
    for values in seen:
        assert values == sorted(values)


@given(lists(sampled_from(["add", "look"])))
def test_looking_changes_nothing(steps):
    tally, added = Tally(), 0
    for each in steps:
        if each == "add":
            tally.add()
            added += 1
        else:
            assert tally.value() == added
    assert tally.value() == added
