"""When a round closes, and with which nodes: tables for the rules, properties for everything else."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rallypoint.rendezvous.quorum import (
    Arrival,
    Close,
    NotYet,
    Settings,
    Standing,
    assign_ranks,
    decide,
    survivors_needed,
)


ELASTIC = Settings(min_nodes=2, max_nodes=4, last_call=30.0, straggler=5.0)


def arrivals(*nodes: str, ranks: dict[str, int] | None = None) -> dict[int, Arrival]:
    """Nodes in the order of their arrival; ``ranks`` are those of the last round."""
    last = ranks or {}
    return {
        slot: Arrival(slot=slot, node_id=name, host=name, last_rank=last.get(name))
        for slot, name in enumerate(nodes)
    }


def names(close: Close | NotYet, standing: Standing) -> list[str]:
    assert isinstance(close, Close), close
    return [standing.arrivals[slot].node_id for slot in close.order]


def first(*nodes: str, **more: object) -> Standing:
    return Standing(arrivals=arrivals(*nodes), first_round=True, **more)  # type: ignore[arg-type]


def later(*nodes: str, last: str = "", **more: object) -> Standing:
    ranks = {name: rank for rank, name in enumerate(last)}
    return Standing(
        arrivals=arrivals(*nodes, ranks=ranks),
        first_round=False,
        **more,  # type: ignore[arg-type]
    )


# -- the rules, one by one ------------------------------------------------------------------------


def test_max_nodes_close_the_round_at_once() -> None:
    standing = first(*"dcba")
    assert names(decide(0.0, ELASTIC, standing), standing) == list("abcd")


def test_who_is_too_many_is_a_spare_and_those_of_the_last_round_come_first() -> None:
    standing = later(*"xyabc", last="abc")
    close = decide(0.0, replace(ELASTIC, max_nodes=3), standing)
    assert names(close, standing) == list("abc")
    assert isinstance(close, Close) and close.spares == (0, 1)


@pytest.mark.parametrize(
    ("standing", "reason", "look_at", "slots"),
    [
        (first("a"), "1 of 2 nodes are here", None, 2),
        (first(), "0 of 2 nodes are here", None, 2),
        (first(*"ab"), "2 of 2 to 4 nodes are here; the last call is open", 130.0, 4),
        (first(*"ab", enough_since=90.0), "2 of 2 to 4 nodes are here; the last call is open", 120.0, 4),
        (first(*"ab", gone=frozenset("b")), "1 of 2 nodes are here", None, 3),
        (
            later(*"ab", last="abc", missing=frozenset("c")),
            "nodes of the last round",
            None,
            3,
        ),
        (later(*"ab", last="ab", waiting=1), "waiting", 105.0, 3),
        (
            later(*"ab", last="ab", survivors_needed=3),
            "2 of the last round's nodes are here, 3 are needed",
            None,
            3,
        ),
        (
            later(*"axyz", last="abcd", survivors_needed=2),
            "1 of the last round's nodes are here, 2 are needed",
            None,
            5,
        ),
    ],
)  # fmt: skip
def test_not_yet(standing: Standing, reason: str, look_at: float | None, slots: int) -> None:
    answer = decide(100.0, ELASTIC, standing)
    assert isinstance(answer, NotYet)
    assert reason in answer.reason
    assert (answer.look_at, answer.slots) == (look_at, slots)


@pytest.mark.parametrize(
    ("now", "standing"),
    [
        (30.0, first(*"ab", enough_since=0.0)),
        (0.0, later(*"ab", last="abc")),  # c is gone
        (5.0, later(*"ab", last="ab", waiting=2, enough_since=0.0)),
        (0.0, later(*"abx", last="ab", waiting=1)),
        (0.0, first(*"ab", out_of_time=True)),
        (0.0, later(*"ab", last="abc", missing=frozenset("c"), out_of_time=True)),
        (0.0, later(*"ab", last="abcd", survivors_needed=2)),
    ],
)
def test_closed(now: float, standing: Standing) -> None:
    assert isinstance(decide(now, ELASTIC, standing), Close)


def test_time_that_is_over_does_not_make_a_minority_a_quorum() -> None:
    too_few = first("a", out_of_time=True)
    assert isinstance(decide(1e9, ELASTIC, too_few), NotYet)
    cut_off = later(*"ab", last="abcd", survivors_needed=3, out_of_time=True)
    assert isinstance(decide(1e9, ELASTIC, cut_off), NotYet)


def test_a_live_member_is_waited_for_beyond_the_last_call() -> None:
    """It may be saving a checkpoint, for example."""
    standing = later(*"ab", last="abc", missing=frozenset("c"), enough_since=0.0)
    assert isinstance(decide(1000.0, ELASTIC, standing), NotYet)


@pytest.mark.parametrize("came", ["axyz", "abxy", "abcx"])
def test_newcomers_do_not_take_the_room_of_members_that_are_on_their_way(came: str) -> None:
    members = "abcd"
    missing = frozenset(members) - frozenset(came)
    standing = later(*came, last=members, missing=missing)
    waits = decide(10.0, ELASTIC, standing)
    assert isinstance(waits, NotYet)
    assert (waits.look_at, waits.slots, waits.enough) == (15.0, 5, True)
    standing = replace(standing, enough_since=10.0)
    assert isinstance(decide(14.9, ELASTIC, standing), NotYet)
    assert names(decide(15.0, ELASTIC, standing), standing), "a moment is enough"
    assert names(decide(11.0, ELASTIC, replace(standing, out_of_time=True)), standing)
    # If one of them is known to have ended, there is room for one more newcomer.
    known = replace(standing, missing=frozenset(sorted(missing)[1:]))
    is_closed = isinstance(decide(11.0, ELASTIC, known), Close)
    assert is_closed == (len(missing) == 1)


# -- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "last", "expected"),
    [
        (["node10", "node2", "node1"], {}, ["node1", "node2", "node10"]),
        (["c", "a", "b"], {"c": 0, "b": 2}, ["c", "a", "b"]),
        (["x", "c", "a"], {"a": 0, "c": 2}, ["a", "x", "c"]),
        (["a", "d"], {"a": 0, "d": 3}, ["a", "d"]),  # the round has no rank 3
        (["d", "c"], {"c": 2, "d": 3}, ["c", "d"]),
        (["a", "b"], {"a": 1, "b": 1}, ["b", "a"]),  # two nodes claim one rank
        (["a", "b"], {"a": -1, "b": 0}, ["b", "a"]),
    ],
)
def test_ranks(nodes: list[str], last: dict[str, int], expected: list[str]) -> None:
    there = list(arrivals(*nodes, ranks=last).values())
    assert [each.node_id for each in assign_ranks(there)] == expected


def test_a_given_rank_goes_before_a_rank_of_the_last_round() -> None:
    there = [
        replace(each, given_rank={"z": 0}.get(each.node_id))
        for each in arrivals(*"abz", ranks={"a": 0, "b": 1}).values()
    ]
    assert [each.node_id for each in assign_ranks(there)] == ["z", "b", "a"]


# -- properties -----------------------------------------------------------------------------------

HOSTS = st.sampled_from(["node1", "node2", "node10", "a", "b", "gpu-7.rack2"])


@st.composite
def situations(draw: st.DrawFn) -> tuple[float, Settings, Standing]:
    least = draw(st.integers(1, 5))
    settings = Settings(
        min_nodes=least,
        max_nodes=draw(st.integers(least, 8)),
        last_call=draw(st.sampled_from([0.0, 3.0, 30.0])),
        straggler=draw(st.sampled_from([0.0, 5.0])),
        by_label=draw(st.booleans()),
    )
    ids = st.sampled_from([f"n{index}" for index in range(9)])
    slots = draw(st.lists(st.integers(0, 14), unique=True, max_size=10))
    first_round = draw(st.booleans())
    there = {
        slot: Arrival(
            slot=slot,
            node_id=draw(ids),
            host=draw(HOSTS),
            label=draw(st.sampled_from(["", "x", "y"])),
            last_rank=None if first_round else draw(st.none() | st.integers(-1, 9)),
        )
        for slot in slots
    }
    here = {each.node_id for each in there.values()}
    gone = draw(st.frozensets(ids, max_size=4))
    missing = frozenset() if first_round else draw(st.frozensets(ids, max_size=3)) - here - gone
    now = draw(st.floats(0, 100))
    standing = Standing(
        arrivals=there,
        first_round=first_round,
        missing=missing,
        waiting=draw(st.integers(0, 6)),
        gone=gone,
        survivors_needed=0 if first_round else draw(st.integers(0, 5)),
        enough_since=draw(st.none() | st.floats(0, 100).map(lambda since: min(since, now))),
        out_of_time=draw(st.booleans()),
    )
    return now, settings, standing


@given(situations())
def test_a_closed_round_keeps_every_promise(case: tuple[float, Settings, Standing]) -> None:
    now, settings, standing = case
    answer = decide(now, settings, standing)
    if not isinstance(answer, Close):
        return
    chosen = [standing.arrivals[slot] for slot in answer.order]
    spares = [standing.arrivals[slot] for slot in answer.spares]
    ids = [each.node_id for each in (*chosen, *spares)]
    assert len(set(ids)) == len(ids), "a node has one place"
    assert not set(ids) & standing.gone
    assert set(ids) == {each.node_id for each in standing.arrivals.values()} - standing.gone
    assert settings.min_nodes <= len(chosen) <= settings.max_nodes
    assert not spares or len(chosen) == settings.max_nodes
    survivors = [each for each in (*chosen, *spares) if each.last_rank is not None]
    assert len(survivors) >= standing.survivors_needed
    # Nodes that were there before take precedence over new ones.
    assert not any(s.last_rank is not None for s in spares) or all(
        each.last_rank is not None for each in chosen
    )
    newest = {each.node_id: slot for slot, each in sorted(standing.arrivals.items())}
    assert all(newest[each.node_id] == each.slot for each in chosen), "its latest record counts"
    assert answer.reason


@given(situations())
def test_whoever_has_to_wait_knows_for_what(case: tuple[float, Settings, Standing]) -> None:
    now, settings, standing = case
    answer = decide(now, settings, standing)
    if not isinstance(answer, NotYet):
        return
    assert answer.reason
    present = {each.node_id for each in standing.arrivals.values()} - standing.gone
    assert answer.enough <= (len(present) >= settings.min_nodes)
    # Something that it names can change the answer: time, or a further arrival.
    assert answer.look_at is not None or answer.slots > len(standing.arrivals)
    if answer.look_at is not None:
        assert answer.look_at > now
        if standing.enough_since is None:
            then = replace(standing, enough_since=now)
        else:
            then = standing if answer.enough else replace(standing, enough_since=None)
        # Slightly later, since adding to a float and subtracting again need not give the same.
        assert isinstance(decide(answer.look_at + 1e-6, settings, then), Close)


@given(situations(), st.randoms())
def test_the_order_in_which_records_were_read_decides_nothing(
    case: tuple[float, Settings, Standing], random: object
) -> None:
    now, settings, standing = case
    items = list(standing.arrivals.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert decide(now, settings, replace(standing, arrivals=dict(items))) == decide(
        now, settings, standing
    )


@given(situations())
def test_a_survivor_keeps_its_rank_where_the_round_has_it(
    case: tuple[float, Settings, Standing],
) -> None:
    now, settings, standing = case
    answer = decide(now, replace(settings, by_label=False), standing)
    if not isinstance(answer, Close):
        return
    chosen = [standing.arrivals[slot] for slot in answer.order]
    for rank, node in enumerate(chosen):
        wanted = node.last_rank
        if wanted is not None and 0 <= wanted < len(chosen) and wanted != rank:
            assert chosen[wanted].last_rank == wanted, "only for another who had it too"


@given(situations())
def test_nodes_of_one_label_stand_together(case: tuple[float, Settings, Standing]) -> None:
    now, settings, standing = case
    answer = decide(now, replace(settings, by_label=True), standing)
    if not isinstance(answer, Close):
        return
    labels = [standing.arrivals[slot].label for slot in answer.order]
    changes = sum(one != other for one, other in itertools.pairwise(labels))
    assert changes == len(set(labels)) - 1


@given(situations())
def test_once_the_time_is_over_enough_nodes_are_enough(
    case: tuple[float, Settings, Standing],
) -> None:
    now, settings, standing = case
    present = {
        each.node_id: each
        for _, each in sorted(standing.arrivals.items())
        if each.node_id not in standing.gone
    }
    survivors = sum(each.last_rank is not None for each in present.values())
    enough = len(present) >= settings.min_nodes and survivors >= standing.survivors_needed
    answer = decide(now, settings, replace(standing, out_of_time=True))
    assert isinstance(answer, Close) == enough


# -- halves of a broken network -------------------------------------------------------------------


@given(st.data())
def test_of_members_that_cannot_reach_each_other_one_side_goes_on_at_most(
    data: st.DataObject,
) -> None:
    """Whatever members have ended, and whatever each side knows of that; one side may still have the store."""
    count = data.draw(st.integers(1, 9), label="members")
    ended = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1), label="ended")
    living = [each for each in range(count) if each not in ended]
    sides = [data.draw(st.integers(0, 2), label="side") for _ in living]
    with_store = data.draw(st.sampled_from([None, 0, 1, 2]), label="side with the store")
    going_on = 0
    for side in set(sides):
        known = data.draw(st.sets(st.sampled_from(sorted(ended)))) if ended else set()
        needed = survivors_needed(count, len(known), moved=side != with_store)
        going_on += sides.count(side) >= needed
    assert going_on <= 1


@pytest.mark.parametrize("moved", [True, False])
@given(count=st.integers(1, 40), data=st.data())
def test_when_all_others_are_known_to_have_ended_the_rest_is_enough(
    moved: bool, count: int, data: st.DataObject
) -> None:
    ended = data.draw(st.integers(0, count - 1))
    assert survivors_needed(count, ended, moved=moved) <= count - ended


def test_held_workers_wait_a_moment_for_a_node_that_nobody_knows_of() -> None:
    standing = later(*"ab", last="abc", gone=frozenset("c"), wanted=3)
    held = decide(100.0, ELASTIC, standing)
    assert held == NotYet(
        "2 nodes hold workers, and 3 are needed to keep them", 105.0, 3, enough=True
    )
    over = replace(standing, enough_since=100.0)
    assert names(decide(105.0, ELASTIC, over), standing) == list("ab")
    come = later(*"abx", last="abc", gone=frozenset("c"), wanted=3)
    assert names(decide(100.0, ELASTIC, come), come) == list("abx")
    known = replace(standing, wanted=0)
    assert names(decide(100.0, ELASTIC, known), known) == list("ab")


def test_given_ranks_hold_whatever_the_labels_are() -> None:
    nodes = [
        Arrival(slot=rank, node_id=str(rank), host="h", label="AB"[rank % 2], given_rank=rank)
        for rank in range(4)
    ]
    assert [each.given_rank for each in assign_ranks(nodes, by_label=True)] == [0, 1, 2, 3]
