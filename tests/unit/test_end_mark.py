"""The mark of a job that has ended well: who is told, and who comes for a new job."""

import os
from pathlib import Path

import pytest

from rallypoint.errors import RendezvousClosedError, RendezvousConnectionError
from rallypoint.rendezvous.backends.file_store import FileStore
from rallypoint.rendezvous.end_mark import ENDED_FOR, EndMark


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ended-job"


def mark(folder: Path, host: str, *, shared: bool = False) -> EndMark:
    return EndMark(lambda: FileStore(folder, shared=shared), FileStore.remove, host, FileStore.age)


def play(folder: Path, *hosts: str, well: bool = True) -> None:
    """A job of these hosts."""
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
    """On a network file system, too, where a look changes the time of a key's folder."""
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
