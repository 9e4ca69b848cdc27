"""What ranks tell each other before a collective: every mismatch is found, and named alike on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rallypoint.parallel.signatures import Signature, find_problem, own_problem


NAMES = st.sampled_from(["all_to_all", "all_gather", "reduce_scatter_sequence", "float8_e4m3fnuz"])


@st.composite
def signatures(draw: st.DrawFn, size: int) -> Signature:
    splits = st.none() | st.lists(st.integers(0, 2**40), min_size=size, max_size=size).map(tuple)
    return Signature(
        operation=draw(NAMES),
        settings=draw(st.sampled_from(["", "sum", "mean"])),
        dim=draw(st.none() | st.integers(-9, 9)),
        divided=draw(st.booleans()),
        src=draw(st.integers(-3, 300)),
        dtype=draw(NAMES),
        device=draw(st.sampled_from(["cpu", "cuda"])),
        shape=draw(st.lists(st.integers(0, 2**40), max_size=8).map(tuple)),
        needs_grad=draw(st.booleans()),
        send_splits=draw(splits),
        recv_splits=draw(splits),
    )


@st.composite
def exchanges(draw: st.DrawFn) -> list[Signature]:
    """Matching signatures of the ranks of an all-to-all."""
    size = draw(st.integers(1, 5))
    rows = draw(
        st.lists(
            st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=size, max_size=size
        )
    )
    return [
        Signature(
            operation="all_to_all",
            dim=0,
            dtype="float32",
            device="cpu",
            shape=(sum(rows[me]), 3),
            send_splits=tuple(rows[me]),
            recv_splits=tuple(rows[other][me] for other in range(size)),
        )
        for me in range(size)
    ]


@given(st.integers(1, 5).flatmap(lambda size: st.tuples(st.just(size), signatures(size))))
def test_a_signature_survives_the_way_to_another_rank(case: tuple[int, Signature]) -> None:
    size, signature = case
    numbers = signature.encode(size)
    assert len(numbers) == len(Signature(operation="x").encode(size)), "whatever it says"
    assert all(-(2**63) <= number < 2**63 for number in numbers)
    assert Signature.decode(numbers, size) == signature


@given(exchanges())
def test_an_exchange_that_goes_together_is_accepted(calls: list[Signature]) -> None:
    assert find_problem(calls, range(len(calls))) is None


@given(exchanges(), st.data())
def test_a_split_that_differs_names_both_ranks(calls: list[Signature], data: st.DataObject) -> None:
    size = len(calls)
    here, there = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    splits = list(calls[here].recv_splits)
    splits[there] += 1
    calls[here] = replace(calls[here], recv_splits=tuple(splits))
    ranks = [10 * (i + 1) for i in range(size)]
    assert find_problem(calls, ranks) == (
        f"rank {ranks[there]} sends {splits[there] - 1} rows to rank {ranks[here]},"
        f" which expects {splits[there]}"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"operation": "all_gather"},
            "the collective differs between ranks: all_reduce on ranks 4, 6; all_gather on rank 5",
        ),
        ({"dtype": "float64"}, "x's dtype differs between ranks: float32 on ranks 4, 6;"),
        ({"device": "cuda"}, "x's device differs between ranks: cpu on ranks 4, 6; cuda on"),
        ({"shape": (2, 4)}, "x's shape differs between ranks: (2, 3) on ranks 4, 6; (2, 4)"),
        ({"shape": (2, 3, 1)}, "(2, 3, 1) on rank 5"),
        ({"settings": "mean"}, "the operation differs between ranks: sum on ranks 4, 6; mean"),
        ({"dim": 1}, "dim differs between ranks: None on ranks 4, 6; 1 on rank 5"),
        ({"src": 1}, "src differs between ranks: 0 on ranks 4, 6; 1 on rank 5"),
        ({"needs_grad": True}, "whether x needs a gradient differs between ranks: no on rank"),
    ],
)
def test_what_differs_is_named_with_the_ranks(change: dict[str, object], text: str) -> None:
    call = Signature(
        operation="all_reduce", settings="sum", dtype="float32", device="cpu", shape=(2, 3)
    )
    problem = find_problem([call, replace(call, **change), call], [4, 5, 6])
    assert problem is not None
    assert text in problem


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": ()}, "x of shape [] has no dimension 0"),
        ({"dim": 2}, "x of shape [4, 3] has no dimension 2"),
        ({"dim": -3}, "x of shape [4, 3] has no dimension -3"),
        ({"dim": 1, "divided": True}, "dimension 1 of x is 3, expected a multiple of 2, the"),
        ({"src": 2}, "src 2: expected 0 to 1"),
        (
            {"send_splits": (4,), "recv_splits": (2, 2)},
            "send_splits has 1 entries, expected one for each of 2 ranks",
        ),
        (
            {"send_splits": (5, -1), "recv_splits": (2, 2)},
            "send_splits [5, -1]: expected numbers of 0 or more",
        ),
        (
            {"send_splits": (2, 1), "recv_splits": (2, 2)},
            "send_splits [2, 1] add up to 3 rows, but x has 4",
        ),
        ({"send_splits": (2, 2), "recv_splits": (1, 1, 1)}, "recv_splits has 3 entries"),
        ({"send_splits": (2, 2)}, "expected send_splits and recv_splits, or neither"),
        ({"recv_splits": (2, 2)}, "expected send_splits and recv_splits, or neither"),
    ],
)
def test_a_call_that_cannot_be_whatever_the_others_do(change: dict[str, object], text: str) -> None:
    call = Signature(operation="all_to_all", dim=0, dtype="float32", device="cpu", shape=(4, 3))
    problem = own_problem(replace(call, **change), 2)
    assert problem is not None
    assert text in problem
    # It is still found after it was sent to the others.
    assert own_problem(Signature.decode(replace(call, **change).encode(2), 2), 2) is not None
    assert own_problem(call, 2) is None


def test_a_problem_of_one_rank_is_told_to_all() -> None:
    call = Signature(operation="all_to_all", dim=0, divided=True, shape=(4, 3))
    problem = find_problem([call, replace(call, shape=(5, 3))], [2, 3])
    assert problem == (
        "rank 3: dimension 0 of x is 5, expected a multiple of 2, the number of ranks"
    )
