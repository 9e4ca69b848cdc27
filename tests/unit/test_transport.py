"""Which way a call takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint.wire import transport, transports
from rallypoint.wire.transport import Address, Choice, Way, choose, why_none


THEIRS: dict[str, Address] = {"memory": "7-1", "uds": "rallypoint-7-ab", "tcp": ("10.0.0.1", 5000)}
ALL = ("memory", "uds", "tcp")
KINDS = st.sampled_from(ALL)


def of(*kinds: str) -> list[Way]:
    """The ways of these kinds; ``tcp+tls`` is one of the kinds."""
    found = (each.partition("+") for each in kinds)
    return [Way(transports.find(kind), tls=bool(tls)) for kind, tls, _ in found]


def ways(ours: tuple[str, ...], theirs: dict[str, Address] = THEIRS, **where: bool) -> list[str]:
    return [each.way.kind for each in choose(of(*ours), theirs, **where)]


@pytest.mark.parametrize(
    ("same_host", "same_process", "expected"),
    [
        (True, True, ["memory", "uds", "tcp"]),
        (True, False, ["uds", "tcp"]),
        (False, False, ["tcp"]),
    ],
)
def test_the_nearer_it_is_the_more_ways_there_are(
    same_host: bool, same_process: bool, expected: list[str]
) -> None:
    assert ways(ALL, same_host=same_host, same_process=same_process) == expected


def test_our_own_order_counts() -> None:
    assert ways(("tcp", "memory", "uds"), same_host=True, same_process=True) == [
        "tcp",
        "memory",
        "uds",
    ]


def test_what_only_one_side_has_is_no_way() -> None:
    assert ways(("uds",), {"tcp": ("h", 1)}, same_host=True, same_process=False) == []
    assert ways((), same_host=True, same_process=True) == []
    assert ways(ALL, {}, same_host=True, same_process=True) == []


def test_a_peer_of_another_host_is_not_asked_by_a_way_that_could_meet_a_stranger() -> None:
    # On this host, the name of its Unix socket belongs to another process, if any.
    assert ways(("uds", "memory"), same_host=False, same_process=False) == []


def test_the_address_is_the_peers() -> None:
    assert choose(of("tcp"), THEIRS, same_host=False, same_process=False) == [
        Choice(*of("tcp"), ("10.0.0.1", 5000))
    ]


@given(st.lists(KINDS, unique=True), st.sets(KINDS), st.booleans(), st.booleans())
def test_ways_are_ours_in_our_order_and_all_of_them_theirs(
    ours: list[str], theirs: set[str], same_host: bool, same_process: bool
) -> None:
    offered: dict[str, Any] = {kind: THEIRS[kind] for kind in theirs}
    chosen = choose(of(*ours), offered, same_host=same_host, same_process=same_process)
    kinds = [each.way.kind for each in chosen]
    assert kinds == [kind for kind in ours if kind in kinds]
    assert set(kinds) <= theirs
    assert ("memory" in kinds) <= same_process
    assert ("uds" in kinds) <= same_host
    assert ("tcp" in kinds) == ("tcp" in ours and "tcp" in theirs)


def test_with_tls_and_without_do_not_meet_and_it_is_said_why() -> None:
    secure: dict[str, Address] = {"uds": "rallypoint-7-ab", "tcp+tls": ("10.0.0.1", 5000)}
    ours = ("memory", "uds", "tcp+tls")
    assert ways(ours, secure, same_host=False, same_process=False) == ["tcp+tls"]
    assert ways(ours, secure, same_host=True, same_process=False) == ["uds", "tcp+tls"]
    assert ways(ours, same_host=False, same_process=False) == []
    assert ways(ALL, secure, same_host=False, same_process=False) == []
    assert why_none(of(*ours), THEIRS).startswith("it does not use TLS, which this worker requires")
    assert why_none(of(*ALL), secure).startswith("it requires TLS and this worker does not use it")
    assert why_none(of("uds"), {"tcp": ("h", 1)}) == "it offers tcp, and this worker may use uds"
    assert (
        why_none(of("uds", "tcp"), {}) == "it offers no transport, and this worker may use uds, tcp"
    )


def test_it_is_pure() -> None:
    # ``socket`` is imported only for a type.
    assert not set(vars(transport)) & {"os", "time", "threading", "torch", "select"}
