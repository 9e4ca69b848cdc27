"""What a node concludes from the job's store, though a stranger has added to it."""

import pytest

from rallypoint.launch.coordination.journal_reader import Round
from rallypoint.launch.coordination.tally import Tally
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec


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
