"""The order of passes in a step: learned from whole steps, and kept by members that match them."""

from hypothesis import given, strategies as st

from rallypoint.join.passes import Pass, Passes


TURNS = [Pass(0, True), Pass(0, False), Pass(1, True), Pass(1, False)]
SHARED_LOSS = [Pass(0, True), Pass(1, True), Pass(1, False), Pass(0, False)]


def note(passes: Passes, step: int, order: list[Pass]) -> None:
    for each in order:
        passes.note(step, each.module, forward=each.forward)


def test_one_module_has_one_order() -> None:
    passes = Passes(1)
    assert passes.order == [Pass(0, True), Pass(0, False)]
    assert passes.missing(0) == passes.order


def test_of_several_modules_the_order_is_learnt() -> None:
    passes = Passes(2)
    assert passes.order is None
    assert passes.missing(7) == TURNS
    note(passes, 0, SHARED_LOSS)
    assert passes.order == SHARED_LOSS
    assert passes.missing(0) == []
    assert passes.missing(1) == SHARED_LOSS


def test_what_blocks_before_have_shown_is_known() -> None:
    passes = Passes(2, SHARED_LOSS)
    assert passes.order == passes.missing(0) == SHARED_LOSS


@given(st.permutations(TURNS), st.integers(0, 3), st.integers(1, 3))
def test_a_step_that_was_left_is_missing_its_rest(order: list[Pass], done: int, steps: int) -> None:
    passes = Passes(2)
    for step in range(steps):
        note(passes, step, order)
    note(passes, steps, order[:done])
    assert passes.order == order
    assert passes.missing(steps + 1) == order
    assert passes.missing(steps) == (order[done:] if done else order)
