"""Which thread leaves the group when several call shutdown."""

import pytest

from rallypoint.rpc.leaving import Part, Roles, part_of


ME, OTHER = 1, 2


@pytest.mark.parametrize("graceful", [True, False])
@pytest.mark.parametrize("serving", [True, False])
def test_the_first_one_leads(graceful, serving):
    assert part_of(None, ME, graceful=graceful, serving=serving) is Part.LEAD


@pytest.mark.parametrize(
    ("leader", "closer", "graceful", "part"),
    [
        (OTHER, None, True, Part.FOLLOW),
        (OTHER, OTHER, True, Part.FOLLOW),
        (None, OTHER, True, Part.FOLLOW),
        (OTHER, None, False, Part.CUT_SHORT),
        (OTHER, OTHER, False, Part.FOLLOW),
        # A signal handler in the leaving thread.
        (ME, None, True, Part.REFUSE),
        (ME, ME, True, Part.REFUSE),
        (ME, None, False, Part.CUT_SHORT),
        (ME, ME, False, Part.RETURN),
        # Another thread has cut this thread's shutdown short, and a handler interrupts it.
        (ME, OTHER, False, Part.RETURN),
        (OTHER, ME, False, Part.RETURN),
    ],
)
def test_nobody_waits_for_itself(leader, closer, graceful, part):
    found = part_of(Roles(leader, closer), ME, graceful=graceful, serving=False)
    assert found is part


def test_a_served_function_does_not_wait_for_an_end_that_waits_for_it():
    assert part_of(Roles(OTHER, OTHER), ME, graceful=False, serving=True) is Part.RETURN
