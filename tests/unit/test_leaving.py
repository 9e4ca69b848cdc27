"""Which ranks have left the loop, and whether that was all of them."""

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import JoinError
from rallypoint.join.leaving import Stay, all_have_left, steps_of_all


def test_those_that_ran_out_do_not_count_as_leaving() -> None:
    assert steps_of_all([Stay(2, False), Stay(7, False)]) == 7
    assert steps_of_all([Stay(2, False), Stay(5, True), Stay(5, True)]) == 5
    assert steps_of_all([Stay(0, True)] * 2) == 0


def test_those_that_left_before_others_are_named() -> None:
    with pytest.raises(JoinError, match="rank 0 left its loop after 1 step; ranks 1, 2 went on to"):
        steps_of_all([Stay(1, True), Stay(4, False), Stay(4, True)])
    with pytest.raises(JoinError, match="rank 0 left .*; rank 1 left .* 3 steps; rank 2 went on"):
        steps_of_all([Stay(1, True), Stay(3, True), Stay(4, False)])


@given(st.dictionaries(st.integers(0, 4), st.integers(0, 6)), st.integers(0, 7))
def test_all_have_left_when_every_note_is_of_this_step_or_before(
    notes: dict[int, int], step: int
) -> None:
    there = [rank for rank in range(5) if notes.get(rank, step + 1) > step]
    assert all_have_left(notes, range(5), step) == (not there)
    assert all_have_left(notes, [rank for rank in range(5) if rank not in there], step)
