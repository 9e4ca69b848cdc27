"""One suite over every store that a rendezvous may use: each backend keeps what the interface promises."""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pace import pace
from rallypoint.errors import RendezvousConnectionError
from rallypoint.rendezvous.backends.file_store import FileStore
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.backends.tcpstore import TcpStore
from rallypoint.rendezvous.store import FilledStore, PairingStore, Store
from tcp_stores import ServedStore


@pytest.fixture
def file_store(tmp_path: Path) -> Store:
    return FileStore(tmp_path / "store", shared=False)


@pytest.fixture
def shared_file_store(tmp_path: Path) -> Store:
    """With the precautions for files shared with other hosts."""
    return FileStore(tmp_path / "store", shared=True)


@pytest.fixture(
    params=[
        MemoryStore,
        ServedStore,
        "etcd_store",
        "file_store",
        "shared_file_store",
        "redislike_store",
    ],
    ids=["memory", "tcpstore", "etcd", "file", "file-shared", "redislike"],
)
def store(request: pytest.FixtureRequest) -> Store:
    if isinstance(request.param, str):  # one of conftest.py's fixtures
        return request.getfixturevalue(request.param)
    make: Callable[[], Store] = request.param
    return make()


def test_a_value_comes_back_as_it_was_set(store: Store) -> None:
    store.set("k", b"\x00\xff value")
    assert store.get("k", 1.0) == b"\x00\xff value"


def test_set_replaces(store: Store) -> None:
    store.set("k", b"1")
    store.set("k", b"2")
    assert store.get("k", 1.0) == b"2"


def test_get_of_a_key_that_never_comes_ends_at_its_timeout(store: Store) -> None:
    before = time.monotonic()
    with pytest.raises(TimeoutError):
        store.get("never", 0.2)
    assert 0.1 < time.monotonic() - before < 5 * pace()


def test_get_waits_for_a_key_that_another_connection_sets(store: Store) -> None:
    other = store.clone()
    timer = threading.Timer(0.2, lambda: other.set("later", b"here"))
    timer.start()
    assert store.get("later", 10.0) == b"here"
    timer.join()


def test_a_blocked_connection_does_not_hold_up_its_clone(store: Store) -> None:
    other = store.clone()
    waiting = threading.Thread(target=lambda: store.get("gate", 10.0))
    waiting.start()
    before = time.monotonic()
    other.set("something", b"else")
    assert time.monotonic() - before < 2 * pace()
    other.set("gate", b"open")
    waiting.join(5)
    assert not waiting.is_alive()


def test_add_counts_from_nothing_and_returns_the_sum(store: Store) -> None:
    assert store.add("n", 2) == 2
    assert store.add("n", 0) == 2
    assert store.add("n", 3) == 5


def test_put_new_keeps_the_first_value_and_tells_the_second_writer(store: Store) -> None:
    assert store.put_new("k", b"first") == b"first"
    assert store.put_new("k", b"second") == b"first"
    assert store.get("k", 1.0) == b"first"


def test_put_new_has_one_winner_among_many_writers(store: Store) -> None:
    held: list[bytes] = []
    clones = [store.clone() for _ in range(8)]
    threads = [
        threading.Thread(target=lambda s=s, i=i: held.append(s.put_new("one", b"%d" % i)))
        for i, s in enumerate(clones)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(held) == 8 and len(set(held)) == 1


def test_exists(store: Store) -> None:
    assert not store.exists("k")
    store.set("k", b"")
    assert store.exists("k")


def test_peek_tells_what_is_there_and_changes_nothing(store: Store) -> None:
    assert store.peek("k") is None
    assert not store.exists("k")
    store.set("k", b"v")
    assert store.peek("k") == b"v"
    store.add("n", 3)
    assert store.peek("n") == b"3"
    assert store.add("n", 1) == 4
    assert store.get("k", 1.0) == b"v"


def test_get_many_tells_what_is_there_and_what_is_not(store: Store) -> None:
    for i in range(0, 700, 3):
        store.set(f"k/{i}", b"%d" % i)
    keys = [f"k/{i}" for i in range(700)]
    assert store.get_many(keys) == [b"%d" % i if i % 3 == 0 else None for i in range(700)]
    assert store.get_many([]) == []


def test_a_counter_is_read_as_decimal_text(store: Store) -> None:
    store.add("n", 41)
    store.add("n", 1)
    assert store.get("n", 1.0) == b"42"
    assert store.get_many(["n", "m"]) == [b"42", None]


def test_add_gives_each_of_many_callers_another_number(store: Store) -> None:
    clones = [store.clone() for _ in range(8)]
    sums: list[int] = []
    threads = [
        threading.Thread(target=lambda s=s: sums.extend(s.add("slots", 1) for _ in range(10)))
        for s in clones
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(sums) == list(range(1, 81))


def test_delete_removes_and_says_whether_there_was_one(store: Store) -> None:
    store.set("k", b"1")
    assert store.delete("k")
    assert not store.delete("k")
    assert not store.exists("k")
    assert store.put_new("k", b"2") == b"2"


def test_a_large_value_passes_whole(store: Store) -> None:
    value = bytes(range(256)) * 4096
    store.set("large", value)
    assert store.get("large", 10.0) == value


def test_closing_a_clone_leaves_the_others_usable(store: Store) -> None:
    other = store.clone()
    other.set("k", b"1")
    other.close()
    other.close()
    assert store.get("k", 1.0) == b"1"


def test_a_store_nobody_serves_any_more_is_a_connection_error() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(RendezvousConnectionError, match="refused"):
        TcpStore("127.0.0.1", port)


def test_a_store_that_reads_what_is_filled_leaves_out_what_is_empty(store: Store) -> None:
    if not isinstance(store, FilledStore):
        pytest.skip("it has no faster way")
    store.set("empty", b"")
    store.set("full", b"v")
    assert store.get_filled(["full", "never", "empty", "full"]) == [b"v", None, None, b"v"]
    assert store.get_many(["empty"]) == [b""]
    assert store.get_filled([]) == []
    many = [f"many/{number}" for number in range(700)]
    store.set(many[-1], b"last")
    assert store.get_filled(many) == [None] * 699 + [b"last"]


def test_a_store_that_pairs_adds_and_reads_in_one_call(store: Store) -> None:
    if not isinstance(store, PairingStore):
        pytest.skip("it has no faster way")
    store.set("full", b"v")
    store.set("empty", b"")
    assert store.add_and_get("n", 2, ["full", "never", "empty"]) == (2, [b"v", None, None])
    assert store.add_and_get("n", 1, ["n"]) == (3, [b"3"]), "it is read after it was added to"
    many = [f"many/{number}" for number in range(300)]
    store.set(many[-1], b"last" * 20_000)
    count, found = store.add_and_get("n", 1, many)
    assert (count, found) == (4, [None] * 299 + [b"last" * 20_000])
    assert store.peek("full") == b"v", "the connection is in step"


def test_the_tcp_store_waits_for_several_keys_at_once(store: Store) -> None:
    if not isinstance(store, TcpStore):
        pytest.skip("only this one can")
    keys = [f"rank/{number}" for number in range(700)]
    with pytest.raises(TimeoutError, match=r"^rank/0 and 511 more did not appear within 0\.2 s"):
        store.get_all(keys, 0.2)
    for key in keys[:-1]:
        store.set(key, key.encode())
    with pytest.raises(TimeoutError, match=r"^rank/699 did not appear"):
        store.get_all(keys, 0.2)
    assert store.exists(keys[0]), "the connection is in step after a wait in vain"
    other = store.clone()
    timer = threading.Timer(0.2, lambda: other.set(keys[-1], b""))
    timer.start()
    assert store.get_all(keys, 10.0) == [*(key.encode() for key in keys[:-1]), b""]
    timer.join()
    assert store.get_all([], 1.0) == []
