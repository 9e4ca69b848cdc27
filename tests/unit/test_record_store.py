"""Records in a store that somebody else writes to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from pace import pace
from rallypoint.errors import RendezvousConnectionError, RendezvousStateError
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.record_store import MAX_COUNT, MAX_SKIPPED, RecordStore
from rallypoint.rendezvous.records import Codec


@pytest.fixture(params=[None, b"secret"], ids=["plain", "secret"])
def codec(request: pytest.FixtureRequest) -> Codec:
    return Codec("job", request.param)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def records(store: MemoryStore, codec: Codec) -> RecordStore:
    return RecordStore(store, codec)


def spoil(store: MemoryStore, records: RecordStore, key: str, times: int = 1) -> None:
    """Write junk under the key and under the names that are tried after it."""
    for index in range(times):
        store.set(records.full(key if index == 0 else f"{key}~{index}"), b"junk")


def test_a_claim_is_won_once(records: RecordStore) -> None:
    assert records.claim("k", {"by": 1}) == {"by": 1}
    assert records.claim("k", {"by": 2}) == {"by": 1}
    assert records.look(["k", "other"]) == [{"by": 1}, None]


@pytest.mark.parametrize("skipped", [0, 1, 3, MAX_SKIPPED - 1])
def test_a_claim_goes_past_junk_and_all_readers_agree(
    store: MemoryStore, records: RecordStore, codec: Codec, skipped: int
) -> None:
    spoil(store, records, "k", skipped)
    assert records.look(["k"]) == [None]
    assert records.wait("k", 0.01) is None
    assert records.claim("k", {"by": 1}) == {"by": 1}
    for reader in (records, RecordStore(store, codec)):
        assert reader.claim("k", {"by": 2}) == {"by": 1}
        assert reader.look(["x", "k"]) == [None, {"by": 1}]
        assert reader.wait("k", 0.01) == {"by": 1}


def test_many_that_claim_at_once_past_junk_have_one_winner(
    store: MemoryStore, records: RecordStore, codec: Codec
) -> None:
    spoil(store, records, "k", 2)
    held: list[object] = []
    threads = [
        threading.Thread(
            target=lambda n=n: held.append(RecordStore(store, codec).claim("k", {"by": n})["by"])
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(held) == 8 and len(set(held)) == 1


def test_who_waits_is_not_woken_by_junk(
    store: MemoryStore, records: RecordStore, codec: Codec
) -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(records.wait("k", 10.0)))
    thread.start()
    for index in range(3):
        spoil(store, records, "k", index + 1)
        time.sleep(0.02)
    assert not found
    RecordStore(store, codec).claim("k", {"by": 1})
    thread.join(5)
    assert found == [{"by": 1}]


def test_a_wait_past_junk_keeps_its_time(store: MemoryStore, records: RecordStore) -> None:
    spoil(store, records, "k", 3)
    before = time.monotonic()
    assert records.wait("k", 0.2) is None
    assert 0.15 < time.monotonic() - before < 2 * pace()


def test_a_record_written_over_junk_counts(store: MemoryStore, records: RecordStore) -> None:
    spoil(store, records, "k")
    records.write("k", {"n": 1})
    assert records.look(["k"]) == [{"n": 1}]


def test_a_deleted_record_is_gone_even_where_it_had_gone_past_junk(
    store: MemoryStore, records: RecordStore
) -> None:
    spoil(store, records, "k")
    records.claim("k", {"n": 1})
    records.delete("k")
    assert records.look(["k"]) == [None]


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_record_spoiled_under_every_name_is_written_anew_and_all_readers_agree(
    store: MemoryStore, records: RecordStore, codec: Codec, rounds: int
) -> None:
    for each in range(rounds):
        spoil(store, records, "k", MAX_SKIPPED)
        assert records.look(["k"]) == [None]
        assert records.peek("k") is None
        assert records.wait("k", 0.01) is None
        assert records.claim("k", {"by": each}) == {"by": each}
        for reader in (records, RecordStore(store, codec)):
            assert reader.claim("k", {"by": "other"}) == {"by": each}
            assert reader.look(["x", "k"]) == [None, {"by": each}]
            assert reader.wait("k", 0.01) == {"by": each}


def test_a_waiting_reader_gets_a_record_that_replaces_junk(
    store: MemoryStore, records: RecordStore, codec: Codec
) -> None:
    spoil(store, records, "k", MAX_SKIPPED)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(records.wait("k", 60.0)))
    thread.start()
    RecordStore(store, codec).claim("k", {"by": 1})
    thread.join(60)
    assert found == [{"by": 1}]


def test_writers_that_replace_junk_at_once_agree_on_one_record(
    store: MemoryStore, records: RecordStore, codec: Codec
) -> None:
    spoil(store, records, "k", MAX_SKIPPED)
    held: list[object] = []
    threads = [
        threading.Thread(
            target=lambda n=n: held.append(RecordStore(store, codec).claim("k", {"by": n})["by"])
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(held) == 8 and len(set(held)) == 1


class AlwaysFaster(MemoryStore):
    """Somebody else writes after each of our operations, so nothing that we write stays."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        super().compare_set(key, expected, desired)
        self.set(key, b"junk")
        return b"junk"

    def delete(self, key: str) -> bool:
        found = super().delete(key)
        self.set(key, b"junk")
        return found


def test_a_stranger_that_is_always_faster_ends_in_an_error_that_says_what_to_do(
    codec: Codec,
) -> None:
    store = AlwaysFaster()
    records = RecordStore(store, codec)
    spoil(store, records, "k", MAX_SKIPPED)
    with pytest.raises(RendezvousStateError, match="--secret-file"):
        records.claim("k", {})
    with pytest.raises(RendezvousStateError, match="another program"):
        records.increment("k")
    assert records.count("k") == 0
    with pytest.raises(RendezvousStateError, match="another program"):
        records.improve("k", lambda held: {"n": 1} if held is None else None)


def test_a_counter_spoiled_under_every_name_counts_again(
    store: MemoryStore, records: RecordStore, codec: Codec
) -> None:
    spoil(store, records, "n", MAX_SKIPPED)
    assert records.count("n") == 0
    assert records.increment("n") == 1
    assert RecordStore(store, codec).increment("n") == 2
    assert records.count("n") == 2


# -- counters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "junk", [b"", b"x", b"\xff\x00", b"-3", b"9" * 30, b"%d" % (MAX_COUNT + 7), b"1.5", b"0x10"]
)
def test_a_counter_goes_past_what_is_no_count(
    store: MemoryStore, records: RecordStore, codec: Codec, junk: bytes
) -> None:
    store.set(records.full("n"), junk)
    assert records.count("n") == 0
    other = RecordStore(store, codec)
    assert [records.increment("n"), other.increment("n")] == [1, 2]
    assert records.count("n") == other.count("n") == 2


def test_a_counter_that_nobody_touched_is_0(records: RecordStore) -> None:
    assert records.count("n") == 0
    assert records.increment("n") == 1


class HangsUp(MemoryStore):
    """Acts like c10d's server on an add to a value that is no number: it hangs up; other connections go on."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = 1
        self.broken = False

    def add(self, key: str, amount: int) -> int:
        if self.broken:
            raise RendezvousConnectionError("the connection is broken")
        try:
            return super().add(key, amount)
        except ValueError:
            self.broken = True
            raise RendezvousConnectionError("the server hung up") from None

    def clone(self) -> HangsUp:
        other = HangsUp()
        other._values, other._changed = self._values, self._changed
        return other


def test_a_server_that_hangs_up_on_a_spoiled_counter_is_called_again(codec: Codec) -> None:
    store = HangsUp()
    records = RecordStore(store, codec)
    store.set(records.full("n"), b"junk")
    store.set(records.full("n~1"), b"junk")
    assert [records.increment("n"), records.increment("n")] == [1, 2]
    assert records.count("n") == 2


def test_a_connection_that_breaks_on_a_sound_counter_is_an_error(codec: Codec) -> None:
    store = HangsUp()
    records = RecordStore(store, codec)
    records.increment("n")
    store.broken = True
    with pytest.raises(RendezvousConnectionError):
        records.increment("n")


class Pairs(HangsUp):
    """Adds and reads in one request, as c10d's server does."""

    requests = 0

    def get_filled(self, keys: Sequence[str]) -> list[bytes | None]:
        return [value or None for value in self.get_many(keys)]

    def add_and_get(
        self, key: str, amount: int, keys: Sequence[str]
    ) -> tuple[int, list[bytes | None]]:
        Pairs.requests += 1
        return self.add(key, amount), self.get_filled(keys)

    def clone(self) -> Pairs:
        other = Pairs()
        other._values, other._changed = self._values, self._changed
        return other


@pytest.mark.parametrize("kind", [MemoryStore, Pairs])
@pytest.mark.parametrize("held", [None, b"junk", b"-5", b"999999999"], ids=repr)
def test_to_count_and_look_at_once_is_to_count_and_then_to_look(
    codec: Codec, kind: type[MemoryStore], held: bytes | None
) -> None:
    store = kind()
    records = RecordStore(store, codec)
    if held is not None:
        store.set(records.full("n"), held)
    spoil(store, records, "k")
    records.claim("k", {"its": 1})
    before = Pairs.requests
    assert records.increment_and_look("n", ["k", "none"]) == (1, [{"its": 1}, None])
    assert records.increment_and_look("n", []) == (2, [])
    assert records.count("n") == 2
    assert Pairs.requests - before == (kind is Pairs)


def test_a_connection_that_breaks_while_it_counts_and_looks_is_an_error(codec: Codec) -> None:
    store = Pairs()
    records = RecordStore(store, codec)
    records.increment("n")
    store.broken = True
    with pytest.raises(RendezvousConnectionError):
        records.increment_and_look("n", ["k"])


# -- what is said of it ---------------------------------------------------------------------------


def test_junk_is_mentioned_once(
    store: MemoryStore, records: RecordStore, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(store, records, "k")
    store.set(records.full("n"), b"x")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            records.look(["k"])
            records.wait("k", 0.0)
            records.count("n")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told
    assert all("ignored the value of" in each for each in told)


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    junk=st.dictionaries(
        st.sampled_from(["k", "k~1", "k~2", "n", "n~1"]), st.binary(max_size=60), max_size=5
    )
)
def test_whatever_stands_there_readers_agree(junk: dict[str, bytes]) -> None:
    store, codec = MemoryStore(), Codec("job", b"secret")
    one, other = RecordStore(store, codec), RecordStore(store, codec)
    for key, value in junk.items():
        store.set(one.full(key), value)
    held = one.claim("k", {"by": "one"})
    assert other.claim("k", {"by": "other"}) == held == {"by": "one"}
    assert other.look(["k"]) == [held]
    assert other.wait("k", 0.0) == held
    first = one.increment("n")
    assert 0 < first <= MAX_COUNT
    assert other.count("n") == first
