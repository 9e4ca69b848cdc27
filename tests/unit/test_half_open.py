"""Which half-open connection makes room for a new one: never a member's, while strangers hold more than their share."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from rallypoint._core.half_open import FAIR, HalfOpen, room, source_of


SOURCES = [f"10.0.0.{number}" for number in range(6)]
Came = list[tuple[str, bool]]
# Who comes, and whether one of those present leaves on its own first.
comings = st.lists(st.tuples(st.sampled_from(SOURCES), st.booleans()), max_size=300)


@given(comings, st.integers(1, 60))
def test_the_greediest_pays_with_its_oldest(came: Came, most: int) -> None:
    held: HalfOpen[int] = HalfOpen(most)
    model: dict[int, str] = {}
    for number, (source, goes) in enumerate(came):
        if goes and model:
            gone = next(itertools.islice(model, number % len(model), None))
            held.remove(gone)
            held.remove(gone)
            del model[gone]
        counts = Counter(model.values())
        found = held.add(number, source)
        if len(model) < most:
            assert found is None
        else:
            assert found is not None
            victim, whose = found
            assert whose == model[victim]
            if max(counts.values()) > FAIR:
                assert counts[whose] == max(counts.values())
                assert victim == min(each for each, its in model.items() if its == whose)
            else:
                assert victim == min(model)
            del model[victim]
        model[number] = source
        assert list(held) == list(model)
        assert len(held) <= most


@given(
    st.lists(st.sampled_from(["same", "other", *SOURCES]), max_size=400),
    st.integers(FAIR + 2, 60),
    st.lists(st.sampled_from(SOURCES), max_size=60),
)
def test_whoever_comes_stays_for_a_while(later: list[str], most: int, before: list[str]) -> None:
    """The bound is in connections, and so in time, given how many strangers can open per second."""
    held: HalfOpen[object] = HalfOpen(most)
    for number, source in enumerate(before):
        held.add(("before", number), source)
    held.add("member", "same")
    for number, source in enumerate(later):
        if held.add(number, source) == ("member", "same"):
            came = Counter(later[: number + 1])
            # Enough to fill the whole room, or more than a fair share from its own address.
            assert number + 1 >= most or came["same"] >= FAIR
            return


def test_a_member_outlasts_any_number_of_connections_from_elsewhere() -> None:
    held: HalfOpen[object] = HalfOpen(64)
    for number in range(5000):
        held.add(number, "10.0.0.1")
    held.add("member", "10.0.0.2")
    for number in range(5000, 10_000):
        assert held.add(number, "10.0.0.1") != ("member", "10.0.0.2")
    assert "member" in held
    assert len(held) == 64


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("127.0.0.1", "this host"),
        ("127.3.2.1", "this host"),
        ("::ffff:127.0.0.1", "this host"),
        ("::1", "this host"),
        ("fe80::1%eth0", "fe80:0000:0000:0000::/64"),
        ("2001:db8:0:7::1", "2001:0db8:0000:0007::/64"),
        ("2001:db8:0:7:ffff::", "2001:0db8:0000:0007::/64"),
        ("user 1000", "user 1000"),
    ],
)
def test_one_host_is_one_source(address: str, source: str) -> None:
    assert source_of(address) == source


@given(st.integers(0, 1 << 30))
def test_room_is_a_part_of_what_a_process_may_have(descriptors: int) -> None:
    assert 64 <= room(descriptors) <= 1024
    assert room(1024) == 256
