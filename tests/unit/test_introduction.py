"""Introductions: what can be read from any bytes, and which two nodes fit together."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rallypoint.rendezvous.introduction import (
    LONGEST,
    Introduction,
    Mismatch,
    Role,
    mismatches,
    pack,
    unpack,
)


ME = Introduction(
    node_id="a",
    host="host-a",
    run_id="job",
    nodes="2",
    given_rank=False,
    rallypoint="0.1.0",
    torch="2.13",
    python="3.11",
)
OTHER = replace(ME, node_id="b", host="host-b")

texts = st.text(st.characters(categories=("L", "N", "P")), max_size=20)
introductions = st.builds(
    Introduction,
    node_id=texts,
    host=texts,
    run_id=texts,
    nodes=texts,
    given_rank=st.booleans(),
    rallypoint=texts,
    torch=texts,
    python=texts,
)
secrets = st.none() | st.binary(min_size=1, max_size=8)


def found(
    other: Introduction, mine: bytes | None = None, theirs: bytes | None = None
) -> tuple[Mismatch, ...]:
    guest = unpack(pack(other, theirs, Role.HOST), mine, Role.HOST)
    assert guest is not None
    return mismatches(ME, mine, guest)


@given(introductions, secrets, secrets)
def test_what_is_packed_is_read_and_the_same_secret_is_proof(told, theirs, mine):
    guest = unpack(pack(told, theirs, Role.OTHER), mine, Role.OTHER)
    assert guest is not None
    shown = guest.introduction.run_id
    assert replace(guest.introduction, run_id=told.run_id) == told
    assert (shown == told.run_id) == (theirs is None), (
        "who has no secret is not told the job's name"
    )
    assert guest.has_secret == (theirs is not None)
    assert guest.proved == (mine is not None and mine == theirs)


@given(st.binary(max_size=200), secrets)
def test_any_bytes_are_an_introduction_or_none(data, secret):
    guest = unpack(data, secret, Role.HOST)
    if guest is not None:
        assert guest.introduction.host.isprintable()
        mismatches(ME, secret, guest)


def test_what_is_too_long_or_nested_is_none():
    assert unpack(b"[" * LONGEST, None, Role.HOST) is None
    assert unpack(b'{"host": "' + b"x" * LONGEST + b'"}', None, Role.HOST) is None


def test_names_from_elsewhere_do_nothing_to_the_terminal():
    guest = unpack(
        pack(replace(OTHER, host="\x1b[2Jhost\n" + "y" * 500), None, Role.HOST), None, Role.HOST
    )
    assert guest is not None
    assert guest.introduction.host.startswith("[2Jhosty")
    assert len(guest.introduction.host) <= 100


def test_nodes_that_go_together_differ_in_nothing():
    assert found(OTHER) == ()
    assert found(OTHER, b"s", b"s") == ()


@pytest.mark.parametrize(
    ("other", "mine", "theirs", "field", "says", "hopeless"),
    [
        (replace(OTHER, run_id="more"), None, None, "--rdzv-id", "'more', of host-b", False),
        # With another job's node, nothing else is compared.
        (replace(OTHER, run_id="more", nodes="9"), None, None, "--rdzv-id", "'more'", False),
        (
            replace(OTHER, run_id="more"),
            b"a",
            b"a",
            "--rdzv-id",
            "another job uses this endpoint",
            False,
        ),
        (replace(OTHER, run_id="more", nodes="9"), b"a", b"b", "--secret-file", "another", False),
        (OTHER, b"a", b"b", "--secret-file", "host-b has another secret", False),
        (OTHER, b"a", None, "--secret-file", "this node has a secret and host-b has none", False),
        (OTHER, None, b"b", "--secret-file", "host-b has a secret and this node has none", False),
        # A node that does not know the secret cannot turn anybody away.
        (replace(OTHER, nodes="3"), b"a", None, "--secret-file", "has none", False),
        (replace(OTHER, nodes="3"), None, None, "--nnodes", "2 here and 3 on host-b", True),
        (replace(OTHER, nodes="2:4"), None, None, "--nnodes", "2 here and 2:4 on host-b", True),
        (replace(OTHER, given_rank=True), None, None, "--node-rank", "host-b was given", True),
        (replace(OTHER, torch="2.12"), None, None, "versions", "torch 2.13 here and 2.12", False),
        (replace(OTHER, python="3.12"), None, None, "versions", "Python 3.11 here", False),
        (replace(OTHER, rallypoint="1"), None, None, "versions", "rallypoint 0.1.0 here", False),
    ],
)
def test_each_difference_has_its_name(other, mine, theirs, field, says, hopeless):
    (mismatch,) = found(other, mine, theirs)
    assert mismatch.field == field
    assert says in str(mismatch)
    assert mismatch.hopeless == hopeless


def test_ranges_may_differ_since_a_running_job_grows_node_by_node():
    guest = unpack(pack(replace(OTHER, nodes="2:8"), None, Role.HOST), None, Role.HOST)
    assert guest is not None
    (mismatch,) = mismatches(replace(ME, nodes="2:4"), None, guest)
    assert not mismatch.hopeless


@given(introductions, introductions, secrets, secrets)
def test_both_sides_see_the_same_difference(one, other, first, second):
    ours = unpack(pack(other, second, Role.HOST), first, Role.HOST)
    theirs = unpack(pack(one, first, Role.HOST), second, Role.HOST)
    assert ours is not None and theirs is not None
    here = mismatches(one, first, ours)
    there = mismatches(other, second, theirs)
    assert [(m.field, m.hopeless) for m in here] == [(m.field, m.hopeless) for m in there]
