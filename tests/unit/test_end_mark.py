"""The mark of a job that has ended well: which nodes are told, and which have come for a new job."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rallypoint.errors import RendezvousClosedError, RendezvousConnectionError
from rallypoint.rendezvous.backends.file_store import FileStore
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.end_mark import ENDED_FOR, EndMark


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ended-job"


def mark(folder: Path, host: str, *, shared: bool = False) -> EndMark:
    return EndMark(lambda: FileStore(folder, shared=shared), FileStore.remove, host, FileStore.age)


def play(folder: Path, *hosts: str, well: bool = True) -> None:
    """Run a job with these hosts."""
    marks = [mark(folder, host) for host in hosts]
    for each in marks:
        each.come()
    marks[-1].leave(well=well)
    for each in marks:
        each.close()


def test_a_late_host_is_told_once_and_then_comes_for_a_new_job(folder: Path) -> None:
    play(folder, "a", "b")
    with pytest.raises(RendezvousClosedError, match="the job has ended well"):
        mark(folder, "c").come()
    play(folder, "c")


def test_hosts_that_took_part_run_the_same_line_again(folder: Path) -> None:
    for _ in range(3):
        play(folder, "b", "a")


def test_a_job_that_failed_leaves_nothing(folder: Path) -> None:
    play(folder, "a", "b", well=False)
    assert not folder.exists()
    mark(folder, "c").come()


@pytest.mark.parametrize("shared", [False, True], ids=["local", "network"])
def test_a_mark_is_void_after_a_while(folder: Path, shared: bool) -> None:
    """Also on a network file system, where a look changes the time of a key's folder."""
    play(folder, "a")
    (ended,) = folder.glob("*ended*/[0-9]*")
    changed = ended.stat().st_mtime - ENDED_FOR - 1
    os.utime(ended, (changed, changed))
    mark(folder, "c", shared=shared).come()


def test_a_store_that_cannot_be_reached_is_somebody_elses_concern() -> None:
    def unreachable() -> FileStore:
        raise RendezvousConnectionError("no route")

    alone = EndMark(unreachable, FileStore.remove, "a")
    alone.come()
    alone.leave(well=True)
    alone.close()


class _Interrupted(MemoryStore):
    """Before the operation with this number, another node does something."""

    def __init__(self, beneath: MemoryStore, number: int, other: Callable[[], None]) -> None:
        self._values, self._changed = beneath._values, beneath._changed
        self._left, self._other = number, other

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._other()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self._count()
        return super().get_many(keys)

    def set(self, key: str, value: bytes) -> None:
        self._count()
        super().set(key, value)

    def add(self, key: str, amount: int) -> int:
        self._count()
        return super().add(key, amount)

    def delete(self, key: str) -> bool:
        self._count()
        return super().delete(key)


def _jobs_of(store: MemoryStore) -> Callable[..., EndMark]:
    def remove(_: MemoryStore) -> None:
        store._values.clear()

    def node(host: str, own: MemoryStore = store) -> EndMark:
        return EndMark(lambda: own, remove, host)

    return node


def _interleavings() -> Iterator[tuple[MemoryStore, EndMark]]:
    """Two jobs of a and b have ended; now a comes, and b comes just before one of a's operations, each of them in turn."""
    for number in itertools.count(1):
        store, called = MemoryStore(), []
        node = _jobs_of(store)
        for _ in range(2):
            both = [node("a"), node("b")]
            for each in both:
                each.come()
            both[-1].leave(well=True)

        def other(node: Callable[..., EndMark] = node, called: list[int] = called) -> None:
            called.append(1)
            node("b").come()

        a = node("a", _Interrupted(store, number, other))
        a.come()
        if not called:
            return
        yield store, a


def test_nodes_that_come_at_the_same_moment_do_not_erase_each_other() -> None:
    tried = 0
    for store, a in _interleavings():
        tried += 1
        a.leave(well=True)
        node = _jobs_of(store)
        for host in ("a", "b"):
            node(host).come()  # both took part, so neither is told
    assert tried >= 5


def test_lists_of_jobs_of_long_ago_are_removed() -> None:
    store = MemoryStore()
    node = _jobs_of(store)
    sizes = []
    for _ in range(5):
        both = [node("a"), node("b")]
        for each in both:
            each.come()
        both[0].leave(well=True)
        sizes.append(len(store._values))
    assert sizes[2] == sizes[4]


def test_once_the_next_job_has_begun_nobody_is_told_of_the_last(folder: Path) -> None:
    play(folder, "a", "b")
    mark(folder, "a").come()
    late = mark(folder, "c")
    late.come()
    late.leave(well=True)
    with pytest.raises(RendezvousClosedError):
        mark(folder, "d").come()
    for host in ("a", "c"):
        mark(folder, host).come()


def test_a_mark_whose_hosts_were_lost_is_not_left() -> None:
    store = MemoryStore()
    node = _jobs_of(store)
    a = node("a")
    a.come()
    store._values.clear()
    a.leave(well=True)
    node("a").come()
