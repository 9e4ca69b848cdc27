"""A generation's journal: order, holes, and entries that are withdrawn."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint.launch.coordination import node_questions, place_ranges
from rallypoint.launch.coordination.journal import MAX_AHEAD, OUTSIDE, Journal
from rallypoint.launch.coordination.journal_reader import JournalReader, Round
from rallypoint.launch.coordination.node_questions import NodeQuestions
from rallypoint.launch.coordination.place_ranges import PlaceRanges
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.record_store import MAX_COUNT, RecordStore
from rallypoint.rendezvous.records import Codec


NODES = 3


def _records(store: MemoryStore) -> RecordStore:
    return RecordStore(store, Codec("job"))


def _read(journal: Journal) -> list[str]:
    """All entries so far, without the empty ones."""
    found = []
    while (entry := journal.next(0.0)) is not None:
        found.append(str(entry["what"]))
    return [each for each in found if each != "nothing"]


def test_a_journal_has_no_last_place() -> None:
    store = MemoryStore()
    records = _records(store)
    store.add(records.full("0/journal/places"), MAX_COUNT + 5)
    reader = Journal(records, 0)
    reader._next = MAX_COUNT + 5
    assert Journal(records, 0).append({"what": "failed"}) == MAX_COUNT + 5
    assert _read(reader) == ["failed"]


def test_a_hole_of_a_writer_that_died_is_filled_and_the_writer_goes_on_behind_it() -> None:
    store = MemoryStore()
    records = _records(store)
    place = records.increment("0/journal/places") - 1
    Journal(records, 0).append({"what": "after"})
    assert _read(Journal(records, 0, NODES)) == ["after"]
    late = records.claim(f"0/journal/{place}", {"what": "late", "id": "mine"})
    assert late["what"] == "nothing"  # so that all readers agree


@given(st.lists(st.tuples(st.integers(0, NODES - 1), st.sampled_from("awr"), st.integers(0, 2))))
def test_all_read_the_same_in_the_same_order_whatever_is_withdrawn(
    steps: list[tuple[int, str, int]],
) -> None:
    """a: a node appends an entry; w: it withdraws its oldest; r: a reader reads on."""
    store = MemoryStore()
    records = _records(store)
    readers = [Journal(records, 0, NODES) for _ in range(3)]
    heard: list[list[str]] = [[] for _ in readers]
    withdrawn = [PlaceRanges() for _ in range(NODES)]
    places: list[list[tuple[int, str]]] = [[] for _ in range(NODES)]
    kept: list[str] = []
    for number, (node, what, reader) in enumerate(steps):
        journal = Journal(records, 0)
        if what == "a":
            name = f"{number}"
            places[node].append((journal.append({"what": name}), name))
            kept.append(name)
        elif what == "w" and places[node]:
            place, name = places[node].pop(0)
            journal.withdraw(place, node, withdrawn[node])
            kept.remove(name)
        else:
            heard[reader] += _read(readers[reader])
    for reader, journal in enumerate(readers):
        heard[reader] += _read(journal)
        assert [each for each in heard[reader] if each in kept] == kept
        assert heard[reader] == sorted(heard[reader], key=int)
    assert _read(Journal(records, 0, NODES)) == kept


def _read_on(journal: Journal) -> list[str]:
    """Like :func:`_read`, twice: a reader that starts again has nothing at first."""
    return _read(journal) + _read(journal)


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_what_is_written_after_all_keys_were_lost_is_read(before: int, after: int) -> None:
    store = MemoryStore()
    records = _records(store)
    reader = Journal(records, 0, NODES)
    for index in range(before):
        Journal(records, 0).append({"what": f"old {index}"})
    assert len(_read(reader)) == before and not reader.was_lost
    store._values.clear()
    new = [f"new {index}" for index in range(after)]
    for what in new[:2]:
        Journal(records, 0).append({"what": what})
    found = [] if after == 5 else _read_on(reader)
    for what in new[2:]:
        Journal(records, 0).append({"what": what})
    found += _read_on(reader)
    # A reader that finds an entry at its old place reads that one first.
    assert (sorted(found) if after > before else found) == new
    assert reader.was_lost


def test_a_counter_that_was_set_back_lets_nothing_be_read_twice() -> None:
    store = MemoryStore()
    records = _records(store)
    reader = Journal(records, 0, NODES)
    for index in range(3):
        Journal(records, 0).append({"what": f"old {index}"})
    assert len(_read(reader)) == 3
    store.set(records.full("0/journal/places"), b"1")
    assert _read_on(reader) == []
    Journal(records, 0).append({"what": "new"})
    assert _read_on(reader) == ["new"]


class _Heard:
    plan: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.closed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.entries: queue.SimpleQueue[str] = queue.SimpleQueue()

    def heed(self, current: Round, entry: Mapping[str, Any]) -> None:
        self.entries.put(str(entry["what"]))

    def heed_closed(self, current: Round, reason: str) -> None:
        self.closed.put(reason)


def test_that_the_job_was_closed_is_told_if_the_entry_that_says_why_may_be_lost() -> None:
    store = MemoryStore()
    records = _records(store)
    heard = _Heard()
    reader = JournalReader(heard, Round(0, 0, 2), _records(store), 0.01)  # type: ignore[arg-type]
    Journal(records, 0).append({"what": "waiting"})
    reader.start()
    assert heard.entries.get(timeout=60) == "waiting"
    records.claim("1/call", {"closed": "why"})
    with pytest.raises(queue.Empty):
        heard.closed.get(timeout=0.1)
    store.delete(records.full("0/journal/0"))
    store.delete(records.full("0/journal/places"))
    assert heard.closed.get(timeout=60) == "why"
    reader.end()


@given(st.lists(st.integers(0, 60)), st.integers(0, 62))
def test_ranges_are_a_set_of_places(places: list[int], place: int) -> None:
    ranges = PlaceRanges()
    for each in places:
        ranges.add(each)
    told = PlaceRanges.from_json(ranges.to_json())
    end = told.end_of(place)
    assert (end is not None) == (place in places)
    if end is not None:
        assert end not in places and all(each in places for each in range(place, end))


def test_the_oldest_ranges_are_forgotten() -> None:
    ranges = PlaceRanges()
    for place in range(0, 4 * place_ranges.MAX_RANGES, 2):
        ranges.add(place)
    assert len(ranges.to_json()["ranges"]) == place_ranges.MAX_RANGES
    assert ranges.end_of(0) is None
    assert ranges.end_of(4 * place_ranges.MAX_RANGES - 2) is not None


@pytest.mark.parametrize(
    "body", [None, {}, {"ranges": 3}, {"ranges": [[1], "x", [2, 1], [True, 3], [-1, 5], [1.0, 2]]}]
)
def test_what_is_no_range_is_left_out(body: Mapping[str, Any] | None) -> None:
    assert PlaceRanges.from_json(body).to_json() == {"ranges": []}


def test_questions_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    rounds = [Round(0, rank, 2) for rank in range(2)]
    asks, answers = (NodeQuestions(each, lambda: _records(store)) for each in rounds)
    reader = Journal(_records(store), 0, 2)

    def answer_all(number: int) -> None:
        for _ in range(number):
            entry = reader.next(60.0)
            while entry is None or entry["what"] == "nothing":
                entry = reader.next(60.0)
            answers.answer(entry["name"], {"told": entry["question"]["n"]})
            asks.note_read(entry["name"])

    thread = threading.Thread(target=answer_all, args=(301,))
    thread.start()
    for number in range(301):
        if number == 2:
            before = set(store._values)
        assert asks.ask({"n": number}, 60.0) == {1: {"told": number}}
    thread.join(60)
    left, last = set(store._values), before ^ set(store._values)
    assert {key.rpartition("/")[2] for key in last} == {"1", "300"}, "only the last one stays"
    # Nobody answers, or the answer is too late.
    monkeypatch.setattr(node_questions, "OWN_PATIENCE", 0.0)
    for number in range(20):
        assert asks.ask({"n": number}, 0.0) == {1: None}
        answers.answer(f"late-{number}", {})
    assert len(set(store._values) - left) == 1 + node_questions.MAX_ANSWERS
    Journal(_records(store), 0).append({"what": "at last"})
    assert _read(reader) == ["asked", "at last"]
    for each in (asks, answers):
        each.close()


def test_a_question_stays_until_this_nodes_own_reader_has_come_by() -> None:
    """A hole before it would hold it up for a lease, and with it whatever another node reports."""
    store = MemoryStore()
    asks = NodeQuestions(Round(0, 0, 2), lambda: _records(store))
    assert asks.ask({}, 0.0) == {1: None}
    thread = threading.Thread(target=asks.ask, args=({}, 0.0))
    thread.start()
    reader = Journal(_records(store), 0, 1)
    entry = reader.next(60.0)
    assert entry is not None
    thread.join(0.2)
    assert thread.is_alive() and store.get_many(["rally/job/0/journal/0"])[0] is not None
    asks.note_read(entry["name"])
    thread.join(60)
    assert store.get_many(["rally/job/0/journal/0"]) == [None]
    asks.close()


def test_a_question_stays_until_the_next_one() -> None:
    """A node that was stopped when it was asked reads it later. Outsiders ask alike, without knowing of one another."""
    store = MemoryStore()
    late = Journal(_records(store), 0, 2)
    for _ in range(3):
        asks = NodeQuestions(Round(0, OUTSIDE, 2), lambda: _records(store))
        assert asks.ask({}, 0.0) == {0: None, 1: None}
        asks.close()
        entry = late.next(0.0)
        while entry is not None and entry["what"] == "nothing":
            entry = late.next(0.0)
        assert entry is not None and entry["what"] == "asked"
    assert len([key for key in store._values if key.endswith(("/0", "/1", "/2"))]) == 1


def test_connections_are_kept_from_one_question_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_questions, "OWN_PATIENCE", 0.0)
    store = MemoryStore()
    made: list[RecordStore] = []

    def connect() -> RecordStore:
        made.append(_records(store))
        return made[-1]

    asks = NodeQuestions(Round(0, 0, 2), connect)
    for _ in range(5):
        assert asks.ask({}, 0.0) == {1: None}
    assert len(made) == 1
    asks.close()


def test_a_reader_that_is_behind_reads_many_entries_at_once_and_a_single_one_alone() -> None:
    store = MemoryStore()
    writer = Journal(_records(store), 0)
    reader = Journal(_records(store), 0, NODES)
    writer.append({"what": "0"})
    assert reader.next(1.0) is not None
    assert reader._records.operations == 1
    for number in range(1, 1000):
        writer.append({"what": f"{number}"})
    assert _read(reader) == [f"{number}" for number in range(1, 1000)]
    assert reader._records.operations < 1000 / MAX_AHEAD + 20
    # Nothing arrives for a while; then entries are read one at a time again.
    before = reader._records.operations
    writer.append({"what": "later"})
    assert reader.next(1.0) is not None
    assert reader._records.operations == before + 1


def test_a_hole_among_what_is_read_at_once_is_waited_for() -> None:
    store = MemoryStore()
    records = _records(store)
    reader = Journal(_records(store), 0, NODES)
    for number in range(3):
        Journal(records, 0).append({"what": f"{number}"})
    assert [reader.next(0.0) is not None for _ in range(2)] == [True, True]
    hole = records.increment("0/journal/places") - 1
    Journal(records, 0).append({"what": "behind it"})
    third = reader.next(0.0)
    assert third is not None and third["what"] == "2"
    records.claim(f"0/journal/{hole}", {"what": "at last", "id": "mine"})
    assert _read(reader) == ["at last", "behind it"]


def test_only_the_nodes_that_are_asked_are_waited_for() -> None:
    store = MemoryStore()
    asks = NodeQuestions(Round(0, 0, 200), lambda: _records(store))
    others = {rank: NodeQuestions(Round(0, rank, 200), lambda: _records(store)) for rank in (3, 7)}
    asked: list[Any] = []

    def answer() -> None:
        entry = Journal(_records(store), 0).next(60.0)
        assert entry is not None
        asked.append(entry["nodes"])
        for rank in (7, 3):
            others[rank].answer(entry["name"], {"told": rank})
        asks.note_read(entry["name"])

    thread = threading.Thread(target=answer)
    thread.start()
    wanted = frozenset({0, 3, 7})
    assert asks.ask({}, 60.0, wanted) == {3: {"told": 3}, 7: {"told": 7}}
    thread.join(60)
    assert asked == [[3, 7]]
    assert asks.ask({}, 60.0, frozenset({0})) == {}, "this node need not ask others about itself"
    for each in (asks, *others.values()):
        each.close()


def test_silent_nodes_hold_up_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_questions, "OWN_PATIENCE", 0.0)
    store = MemoryStore()
    records = _records(store)
    asks = NodeQuestions(Round(0, 0, 300), lambda: records)
    monkeypatch.setattr(node_questions.uuid, "uuid4", lambda: type("Name", (), {"hex": "name"}))
    for rank in (299, 5):
        answers = NodeQuestions(Round(0, rank, 300), lambda: _records(store))
        answers.answer("name", {"told": rank})
        answers.close()
    before = records.operations
    found = asks.ask({}, 0.0)
    assert {rank: body for rank, body in found.items() if body} == {
        5: {"told": 5},
        299: {"told": 299},
    }
    assert len(found) == 299
    assert records.operations - before < 30, "they are looked for together"
    asks.close()
