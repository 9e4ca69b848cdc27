"""The calls of a connection, while other threads change them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rallypoint.rpc.connections.calls import Call, CallTable


@pytest.fixture
def a_collection_at_every_object() -> Iterator[list[object]]:
    """Collections whose callbacks, put into the list, run in the middle of other code, as another thread's code does."""
    before, known = gc.get_threshold(), list(gc.callbacks)
    gc.set_threshold(1)
    try:
        yield gc.callbacks
    finally:
        gc.callbacks[:] = known
        gc.set_threshold(*before)


def test_calls_that_come_while_deadlines_are_looked_at_do_no_harm(
    a_collection_at_every_object: list[object],
) -> None:
    table = CallTable()
    for number in range(100):
        table.add(number, Call("call", deadline=number, seconds=1.0))
    numbers = iter(range(100, 100_000))
    late = Call("call", deadline=None, seconds=1.0)
    a_collection_at_every_object.append(lambda *_: table.add(next(numbers), late))
    expired, following = table.take_expired(49.5)
    assert [number for number, _ in expired] == list(range(50))
    assert following == 50
