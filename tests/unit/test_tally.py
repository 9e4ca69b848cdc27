"""What a node concludes from the job's store, even if a stranger has added to it."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.launch.coordination.journal_reader import Round
from rallypoint.launch.coordination.tally import Tally, told
from rallypoint.launch.output.failure import (
    Raised,
    WorkerFailure,
    failures_from_json,
    failures_to_json,
)
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import MAX_RECORD, Codec


SECRET = b"known to all the nodes"


def through(records: RecordStore, nodes: int, gone: set[int], *, elastic: bool = True) -> int:
    current = Round(0, 0, nodes)
    current.gone.update(gone)
    return Tally(records, current, elastic=elastic).num_through()


@pytest.mark.parametrize("elastic", [True, False])
def test_a_counter_that_a_stranger_has_raised_does_not_end_the_job(elastic: bool) -> None:
    store = MemoryStore()
    records = RecordStore(store, Codec("job", SECRET))
    records.write("0/done/1", {})
    records.increment("0/done")
    assert through(records, 4, set(), elastic=elastic) == 1
    store.set(records.full("0/done"), b"4")
    store.set(records.full("0/done/2"), b'{"v": 1, "body": {}}')
    assert through(records, 4, set(), elastic=elastic) == 1


def test_who_is_gone_counts_once_whether_it_had_ended_well_or_not() -> None:
    records = RecordStore(MemoryStore(), Codec("job", SECRET))
    assert through(records, 4, {1, 3}) == 2
    for rank in (0, 1, 2):
        records.write(f"0/done/{rank}", {})
        records.increment("0/done")
    assert through(records, 4, {2}) == 3
    assert through(records, 4, {3}) == 4


def failure(rank: int, text: str, chains: int, lines: int) -> WorkerFailure:
    raised = Raised(
        type="ValueError",
        message=text,
        traceback=f"{text} line {rank}",
        at=1.0,
        timestamp=1,
        chains=tuple((("ValueError", text), ("KeyError", text)) for _ in range(chains)),
    )
    return WorkerFailure(
        host="h",
        node_rank=0,
        rank=rank,
        local_rank=rank,
        pid=7,
        generation=0,
        exit_code=1,
        signal=None,
        raised=raised,
        native_stack=text,
        cause="",
        stderr=(text,) * lines,
        at=1.0,
        stopped_by_us=False,
    )


TEXTS = st.builds(
    lambda piece, size: (piece * size)[:32_000],
    st.sampled_from(["x", "\n", '"', "\u4e2d", "\U0001f600", "\ud800"]),
    st.integers(0, 32_000),
)


@settings(deadline=None, max_examples=25)
@given(
    text=TEXTS,
    count=st.integers(1, 80),
    chains=st.integers(0, 3),
    lines=st.integers(0, 20),
)
def test_failures_fit_into_a_record_whatever_their_texts_are(
    text: str, count: int, chains: int, lines: int
) -> None:
    failures = tuple(failure(rank, text, chains, lines) for rank in range(count))
    said = told(failures, 2)
    assert len(json.dumps({"failures": said})) < MAX_RECORD - 4096
    read = failures_from_json(said)
    assert [each.rank for each in read] == list(range(len(read)))
    assert read[0].raised is not None
    assert read[0].raised.traceback.endswith("line 0")
    if len(json.dumps(failures_to_json(failures[:1]))) < 100_000:
        alone = failures_from_json(told(failures[:1], 2))
        assert alone == failures[:1], "nothing is cut without need"


def test_the_reports_of_many_nodes_are_merged_however_long_they_are() -> None:
    records = RecordStore(MemoryStore(), Codec("job", SECRET))
    for node in range(32):
        current = Round(0, node, 32)
        failures = tuple(failure(8 * node + at, "\u4e2d" * 32_000, 1, 0) for at in range(8))
        Tally(records, current, elastic=False).note_report(told(failures, 32))
    Tally(records, Round(0, 0, 32), elastic=False).merge_reports(3)
    (merged,) = records.look(["0/report"])
    assert merged is not None
    assert failures_from_json(merged["failures"])[0].rank in range(24, 32)


def test_what_a_thousand_nodes_read_is_short() -> None:
    failures = tuple(failure(rank, "x" * 4000, 1, 5) for rank in range(8))
    assert len(told(failures, 100)) > 32_000
    assert len(json.dumps(told(failures, 10_000))) <= 16 * 1024
    (first, *_) = failures_from_json(told(failures, 10_000))
    assert first.raised is not None and first.raised.traceback.endswith("line 0")


@pytest.mark.parametrize(("nodes", "tellers"), [(2, 2), (16, 16), (17, 16), (1024, 16)])
def test_if_all_nodes_fail_together_the_first_ones_tell(nodes: int, tellers: int) -> None:
    records = RecordStore(MemoryStore(), Codec("job", SECRET))
    tallies = [Tally(records, Round(0, rank, nodes), elastic=True) for rank in range(nodes)]
    assert sum(each.take_turn_to_tell("failures") for each in tallies) == tellers
    assert tallies[-1].take_turn_to_tell("symptoms"), (
        "a cause is not kept back by symptoms, nor they by it"
    )
    later = Tally(records, Round(1, 0, nodes), elastic=True)
    assert later.take_turn_to_tell("failures"), "nor by what was in another generation"


def test_a_stop_is_told_by_the_last_node_that_is_told_to_stop() -> None:
    store = MemoryStore()
    records = RecordStore(store, Codec("job", SECRET))
    tallies = [Tally(records, Round(0, rank, 3), elastic=True) for rank in range(3)]
    store.set(records.full("0/told"), b"1")  # written by a stranger
    assert [each.note_told_to_stop() for each in tallies] == [False, False, True]
