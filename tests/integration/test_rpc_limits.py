"""What is too much for one message is refused by its sender, and the connection stays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import rpc_workers
from rallypoint import rpc
from rallypoint.rpc.current_agent import current_agent
from rallypoint.wire import frames
from rpc_workers import Workers


pytestmark = [pytest.mark.integration]

# One more than a frame may have.
TOO_MANY = frames.LIMITS.buffers + 1
SMALL = frames.Limits(payload=1 << 20, buffers=10, buffer=1 << 20)


@pytest.fixture
def two() -> Iterator[Workers]:
    with Workers(2) as workers:
        workers.run(rpc_workers.join)
        yield workers
        workers.run(rpc_workers.leave)


@pytest.fixture
def narrow() -> Iterator[Workers]:
    """Two workers with low limits."""
    with Workers(2) as workers:
        workers.run(be_narrow)
        workers.run(rpc_workers.join)
        yield workers
        workers.run(rpc_workers.leave)


def be_narrow() -> None:
    frames.LIMITS = SMALL


def count(tensors: Any) -> int:
    return len(tensors)


def rows(number: int) -> list[torch.Tensor]:
    """This many parts of one tensor; each travels on its own."""
    return list(torch.zeros(number, 4).unbind(0))


def rows_one_by_one(*numbers: int) -> Iterator[list[torch.Tensor]]:
    for number in numbers:
        yield rows(number)


def many(size: int) -> list[None]:
    """A byte of pickle each."""
    return [None] * size


def tensor(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def connections() -> list[Any]:
    """Those to the other worker, of the agent in use."""
    agent = current_agent()
    assert agent is not None
    return list(agent.connections.outgoing.values())


WORDS = rf"a message with {TOO_MANY} tensors .*exceeds the limit of {TOO_MANY - 1}; stack"


def test_too_many_tensors_in_a_call_are_refused_at_once(two):
    def case():
        assert rpc.rpc_sync("w1", count, (rows(TOO_MANY - 1),)) == TOO_MANY - 1
        before = connections()
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.rpc_stream):
            with pytest.raises(rpc.MessageTooLarge, match=WORDS) as caught:
                call("w1", count, (rows(TOO_MANY),))
            assert (caught.value.number, caught.value.limit) == (TOO_MANY, TOO_MANY - 1)
        assert rpc.rpc_sync("w1", count, (rows(3),)) == 3
        assert connections() == before
        assert not any(each.calls or each.in_flight for each in before)

    two.on(0, case)


def test_too_many_tensors_in_a_result_are_an_error_at_the_caller(two):
    def case():
        assert len(rpc.rpc_sync("w1", rows, (TOO_MANY - 1,))) == TOO_MANY - 1
        before = connections()
        with pytest.raises(rpc.MessageTooLarge, match=WORDS) as caught:
            rpc.rpc_sync("w1", rows, (TOO_MANY,))
        assert (
            "The function returned, but its result could not be sent" in caught.value.__notes__[0]
        )
        assert caught.value.limit == TOO_MANY - 1
        with pytest.raises(rpc.MessageTooLarge, match=WORDS):
            rpc.rpc_async("w1", rows, (TOO_MANY,)).wait()
        kept = rpc.remote("w1", rows, (TOO_MANY,))
        with pytest.raises(rpc.MessageTooLarge, match=WORDS):
            kept.to_here()
        assert connections() == before

    two.on(0, case)


def test_too_many_tensors_in_an_item_end_the_stream_and_nothing_else(two):
    def case():
        before = connections()
        stream = rpc.rpc_stream("w1", rows_one_by_one, (2, TOO_MANY, 2))
        assert len(next(stream)) == 2
        with pytest.raises(rpc.MessageTooLarge, match=WORDS):
            next(stream)
        with pytest.raises(StopIteration):
            next(stream)
        assert rpc.rpc_sync("w1", count, (rows(3),)) == 3
        assert before == [] or connections() == before

    two.on(0, case)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (many, r"with \d+ bytes beside its tensors exceeds the limit of 1048576; send it in parts"),
        (tensor, r"with \d+ bytes in tensors exceeds the limit of 1048576; split the call"),
    ],
    ids=["payload", "tensors"],
)
def test_too_many_bytes_are_refused_on_both_ways(narrow, make, words):
    def case(make, words):
        fits, over = SMALL.payload // 2, SMALL.payload + 1
        assert rpc.rpc_sync("w1", len, (make(fits),)) == fits
        assert len(rpc.rpc_sync("w1", make, (fits,))) == fits
        before = connections()
        for arguments in ((make(over),), ({"a": make(over)},)):
            for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.rpc_stream):
                with pytest.raises(rpc.MessageTooLarge, match=words):
                    call("w1", len, arguments)
        with pytest.raises(rpc.MessageTooLarge, match=words):
            rpc.rpc_sync("w1", make, (over,))
        with pytest.raises(rpc.MessageTooLarge, match=words):
            list(rpc.rpc_stream("w1", map, (make, [over])))
        assert connections() == before
        assert not any(each.calls or each.in_flight for each in before)

    narrow.on(0, case, make, words)


def test_a_reference_in_a_message_that_is_refused_holds_nothing(two):
    def case():
        mine = rpc.RRef([1])
        with pytest.raises(rpc.MessageTooLarge):
            rpc.rpc_sync("w1", count, ([mine, *rows(TOO_MANY)],))
        del mine
        rpc_workers.eventually(
            lambda: rpc.api._rref_context_get_debug_info()["num_owner_rrefs"] == "0"
        )

    two.on(0, case)


@pytest.mark.parametrize("seconds", [1e7, math.inf], ids=str)
def test_a_call_may_have_more_time_than_a_frame_can_say(two, seconds):
    def case(seconds):
        assert rpc.rpc_sync("w1", max, (1, 2), timeout=seconds) == 2
        assert rpc.rpc_async("w1", max, (1, 2), timeout=seconds).wait() == 2
        assert list(rpc.rpc_stream("w1", range, (2,), timeout=seconds)) == [0, 1]
        assert not any(each.calls for each in connections())

    two.on(0, case, seconds)


def be_narrow_for_pickles() -> None:
    frames.LIMITS = frames.Limits(payload=SMALL.payload)


def echo(thing: Any) -> Any:
    return thing


@pytest.mark.parametrize("transport", ["uds", "tcp"])
def test_bytes_and_arrays_may_be_larger_than_a_pickle(transport: str) -> None:
    """The limit of a payload does not apply to them, in requests or in answers."""
    size = 4 * SMALL.payload

    def case() -> None:
        for made in (bytes(size), bytearray(size), memoryview(bytes(size)), np.ones(size // 8)):
            found = rpc.rpc_sync("w1", echo, (made,))
            assert type(found) is type(made) and memoryview(found) == memoryview(made)

    with Workers(2) as workers:
        workers.run(be_narrow_for_pickles)
        workers.run(lambda: rpc_workers.join(transports=(transport,)))
        workers.on(0, case)
        workers.run(rpc_workers.leave)


# More than a pickle may have. They are zeros, which take no memory until they are copied.
LARGE = frames.LIMITS.payload + (100 << 20)


def check_zeros(thing: Any) -> int:
    view = memoryview(thing).cast("B")
    assert not view[0] and not view[-1]
    return view.nbytes


def array(size: int) -> Any:
    return np.zeros(size, dtype=np.uint8)


@pytest.mark.long
@pytest.mark.parametrize("make", [bytes, array])
def test_more_than_a_gibibyte_in_one_call(two: Workers, make: Any) -> None:
    def there() -> int:
        return rpc.rpc_sync("w1", check_zeros, (make(LARGE),))

    def back() -> int:
        return check_zeros(rpc.rpc_sync("w1", make, (LARGE,)))

    assert two.on(0, there) == LARGE
    assert two.on(0, back) == LARGE
