"""Our client and torch's own, at torch's server: each sees what the other does. Also replies, cut anywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st

from rallypoint.errors import ProtocolError
from rallypoint.rendezvous.backends import store_messages as messages
from rallypoint.rendezvous.backends.store_messages import Exchange
from rallypoint.rendezvous.backends.tcpstore import TcpStore
from tcp_stores import ServedStore


KEYS = ("k", "a/b", "", "ключ", "long" * 500)
VALUES = (b"", b"v", b"\x00\xff" * 3, b"x" * 1_000_000)


@pytest.fixture(scope="module")
def served() -> Iterator[ServedStore]:
    store = ServedStore()
    yield store
    store.close()


@pytest.fixture
def ours(served: ServedStore) -> Iterator[TcpStore]:
    store = served.clone()
    yield store
    store.close()


@pytest.fixture
def theirs(served: ServedStore) -> dist.Store:
    return dist.TCPStore(
        "127.0.0.1",
        served.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", VALUES, ids=len)
def test_each_client_reads_what_the_other_has_set(
    ours: TcpStore, theirs: dist.Store, key: str, value: bytes
) -> None:
    ours.set(f"ours{key}", value)
    assert ours.get(f"ours{key}", 30.0) == theirs.get(f"ours{key}") == value
    theirs.set(f"theirs{key}", value)
    assert ours.get(f"theirs{key}", 30.0) == value
    assert ours.get_many([f"theirs{key}", "none", f"ours{key}"]) == [value, None, value]
    assert ours.delete(f"theirs{key}")
    assert not ours.delete(f"theirs{key}")
    assert not theirs.check([f"theirs{key}"])


def test_counters_and_conditions_are_the_same_for_both(ours: TcpStore, theirs: dist.Store) -> None:
    assert [ours.add("n", 5), theirs.add("n", -7), ours.add("n", 2**40)] == [5, -2, 2**40 - 2]
    assert theirs.get("n") == ours.get("n", 1.0) == str(2**40 - 2).encode()
    assert ours.compare_set("c", b"", b"1") == b"1"
    assert theirs.compare_set("c", "1", "2") == b"2"
    assert ours.compare_set("c", b"1", b"3") == b"2"
    # The key does not exist, but a value was expected: c10d's own rule.
    assert ours.compare_set("none", b"x", b"y") == theirs.compare_set("none", "x", "y") == b"x"


def test_each_client_wakes_the_other(ours: TcpStore, theirs: dist.Store) -> None:
    setting = threading.Timer(0.1, theirs.set, ("comes", "1"))
    setting.start()
    assert ours.get("comes", 30.0) == b"1"
    setting.join()
    setting = threading.Timer(0.1, ours.set, ("comes too", b"2"))
    setting.start()
    theirs.wait(["comes too"], timedelta(seconds=30))
    setting.join()


def test_a_wait_that_is_given_up_leaves_nothing_behind(ours: TcpStore, theirs: dist.Store) -> None:
    for number in range(50):
        # The key is set about when the wait ends: sometimes before, sometimes after.
        setting = threading.Timer(0.01, theirs.set, (f"late{number}", "1"))
        setting.start()
        try:
            assert ours.get(f"late{number}", 0.01) == b"1"
        except TimeoutError:
            pass
        setting.join()
        assert ours.add("in step", 1) == number + 1


# -- replies ---------------------------------------------------------------------------------------

REPLIES: list[tuple[Exchange[Any], bytes, Any]] = [
    (messages.set_value("k", b"v"), b"", None),
    (messages.get("k"), (3).to_bytes(8, "little") + b"abc", b"abc"),
    (messages.get("k"), bytes(8), b""),
    (messages.get_many(["a", "b"]), (1).to_bytes(8, "little") + b"x" + bytes(8), [b"x", b""]),
    (messages.add("k", -1), (-5).to_bytes(8, "little", signed=True), -5),
    (messages.check(["k"]), b"\x00", True),
    (messages.check(["k"]), b"\x01", False),
    (messages.check_each(["a", "b", "c"]), b"\x00\x01\x00", [True, False, True]),
    (messages.delete("k"), (1).to_bytes(8, "little"), True),
    (messages.delete("k"), bytes(8), False),
    (messages.wait(["k"]), b"\x00", None),
    (messages.cancel_wait(), b"\x01", False),
    (messages.cancel_wait(), b"\x00\x01", True),
]


def read(exchange: Exchange[Any], data: bytes) -> tuple[Any, bytes]:
    """The result, and the data that belongs to no request."""
    reply = exchange.reply()
    try:
        count = next(reply)
        while True:
            assert count <= len(data), "it waits for more than was sent"
            part, data = data[:count], data[count:]
            count = reply.send(part)
    except StopIteration as done:
        return done.value, data


@pytest.mark.parametrize(("exchange", "data", "expected"), REPLIES)
def test_a_reply_is_read_to_its_last_byte_and_no_further(
    exchange: Exchange[Any], data: bytes, expected: Any
) -> None:
    assert read(exchange, data + b"next") == (expected, b"next")


@given(st.integers(min_value=messages.MOST + 1, max_value=2**64 - 1))
def test_a_value_that_is_too_long_is_refused_before_it_is_waited_for(size: int) -> None:
    with pytest.raises(ProtocolError, match=str(size)):
        read(messages.get("k"), size.to_bytes(8, "little"))


@given(st.integers(min_value=2, max_value=255))
def test_what_is_no_answer_to_a_wait_is_refused(answer: int) -> None:
    with pytest.raises(ProtocolError, match=str(answer)):
        read(messages.wait(["k"]), bytes([answer]))
    with pytest.raises(ProtocolError, match=str(answer)):
        read(messages.cancel_wait(), bytes([0, answer]))
