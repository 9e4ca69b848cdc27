"""Records of the set-up in real stores, one of which is lost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import permutations

import pytest

from rallypoint.elastic.communication import setup_record
from rallypoint.elastic.worker.records import Records, RecordsLost
from tcp_stores import ServedStore


RANKS = 3
GROUP = "default"


def part(rank: int) -> str:
    return setup_record.keys(GROUP, rank)[1]


@pytest.fixture
def stores() -> Iterator[list[ServedStore]]:
    both = [ServedStore(), ServedStore()]
    yield both
    for each in both:
        each.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def records(store: ServedStore, *, is_new: bool = False) -> Records:
    return Records("127.0.0.1", store.server.port, RANKS, is_new=is_new)


def survivors(store: ServedStore, holds: dict[int, list[int]]) -> dict[int, Records]:
    """Have all ranks store their records. Returns the ranks in ``holds``, each with the records that it holds."""
    all_ranks = [records(store) for _ in range(RANKS)]
    for rank, each in enumerate(all_ranks):
        each.publish(rank, [(part(rank), b"of %d" % rank)])
    for holder, ranks in holds.items():
        for rank in ranks:
            all_ranks[holder].hold(rank, [(GROUP, rank)])
        assert all_ranks[holder].holds_all(ranks)
    return {holder: all_ranks[holder] for holder in holds}


def come(each: Records, rank: int, store: ServedStore) -> None:
    each.store_again("127.0.0.1", store.server.port, 2, lambda: False)
    each.say_seen(rank)


def newcomer(pool: ThreadPoolExecutor, store: ServedStore, rank: int) -> Future[bytes | None]:
    return pool.submit(records(store, is_new=True).read, part(rank), rank, is_spare=False)


@pytest.mark.parametrize("order", list(permutations(range(RANKS))))
def test_who_waits_for_a_record_that_nobody_has_is_told_so(
    stores: list[ServedStore], threads: ThreadPoolExecutor, order: tuple[int, ...]
) -> None:
    first, second = stores
    (survivor,) = survivors(first, {0: [0, 1]}).values()
    first.close()
    reads: dict[int, Future[bytes | None]] = {}
    for rank in order:
        assert not [each for each in reads.values() if each.done() and each.exception()]
        if rank == 0:
            come(survivor, 0, second)
        else:
            reads[rank] = newcomer(threads, second, rank)
            wait([reads[rank]], 0.05)
    assert reads[1].result(5) == b"of 1"
    with pytest.raises(RecordsLost):
        reads[2].result(5)


def test_a_spare_waits_for_the_rank_that_it_stands_for(
    stores: list[ServedStore], threads: ThreadPoolExecutor
) -> None:
    first, second = stores
    kept = survivors(first, {0: [0], 1: [1], 2: [2]})
    first.close()
    spare = threads.submit(records(second, is_new=True).read, part(2), 2, is_spare=True)
    wait([spare], 0.05)
    for rank in (0, 1):
        come(kept[rank], rank, second)
    assert not spare.done()
    come(kept[2], 2, second)
    assert spare.result(5) == b"of 2"


def test_a_third_store_gets_all_from_those_who_have_read_it_in_the_second(
    stores: list[ServedStore], threads: ThreadPoolExecutor
) -> None:
    first, second = stores
    (survivor,) = survivors(first, {0: [0, 1, 2]}).values()
    first.close()
    come(survivor, 0, second)
    one = records(second, is_new=True)
    assert one.read(part(1), 1, is_spare=False) == b"of 1"
    one.note_read(1)
    second.close()
    third = ServedStore()
    try:
        come(one, 1, third)
        lost = [newcomer(threads, third, rank) for rank in (0, 2)]
        for each in lost:
            with pytest.raises(RecordsLost):
                each.result(5)
        assert newcomer(threads, third, 1).result(5) == b"of 1"
    finally:
        third.close()
