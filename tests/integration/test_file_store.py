"""The store in a folder: many processes at once, kills, a full disk, a client that remembers too long."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from pace import pace
from rallypoint.errors import ConfigError, RendezvousConnectionError
from rallypoint.rendezvous.backends import file_store as file
from rallypoint.rendezvous.backends.file_store import COMPACT_EVERY, KEPT, TEMPORARY, FileStore
from rallypoint.rendezvous.store import ComparingStore


pytestmark = pytest.mark.integration

# After this many changes, there has certainly been a compaction.
MANY = 2 * COMPACT_EVERY + KEPT
# Linux capabilities (linux/capability.h) that put root above permissions.
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2


@pytest.fixture(params=[False, True], ids=["local", "shared"])
def shared(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def temporaries_in(folder: Path) -> list[str]:
    return [path for path in everything_in(folder) if TEMPORARY in path]


class Meddled:
    """The module ``os``, with some calls replaced."""

    def __init__(self, **calls) -> None:
        self.__dict__.update(calls)

    def __getattr__(self, name: str):
        return getattr(os, name)


def once(meanwhile: Callable[[], object]) -> Callable[[], None]:
    """Calls ``meanwhile`` the first time, and does nothing during that call or later."""
    left = [meanwhile]

    def call() -> None:
        if left:
            left.pop()()

    return call


# -- several processes --------------------------------------------------------------------------------

PROLOGUE = """
import sys
from rallypoint.rendezvous.backends.file_store import FileStore
store = FileStore(sys.argv[1], shared=sys.argv[2] == "True")
name = sys.argv[3]
store.add("ready", 1)
store.get("go", 60.0)
"""


def run_together(folder: Path, shared: bool, num_processes: int, body: str) -> list[list[str]]:
    """What this many processes print when they run ``body`` at the same time."""
    store = FileStore(folder, shared=shared)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + body, folder, str(shared), str(i)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(num_processes)
    ]
    try:
        end = time.monotonic() + 60
        while store.get("ready", 60.0) != b"%d" % num_processes and time.monotonic() < end:
            time.sleep(0.01)
        store.set("go", b"")
        printed = [process.communicate(timeout=180)[0].split() for process in processes]
        assert [process.returncode for process in processes] == [0] * num_processes
        return printed
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_processes_that_add_at_once_get_each_another_sum(folder, shared):
    each = 40 if shared else 200
    printed = run_together(folder, shared, 5, f"for _ in range({each}): print(store.add('n', 1))")
    sums = [[int(word) for word in words] for words in printed]
    assert sorted(itertools.chain(*sums)) == list(range(1, 5 * each + 1))
    assert all(own == sorted(own) for own in sums)
    assert FileStore(folder).get("n", 1.0) == b"%d" % (5 * each)
    assert temporaries_in(folder) == []


def test_processes_that_put_new_at_once_have_one_winner(folder, shared):
    body = "for i in range(40): print(store.put_new(f'seat/{i}', name.encode()).decode())"
    printed = run_together(folder, shared, 5, body)
    assert all(words == printed[0] for words in printed)
    assert FileStore(folder).get_many([f"seat/{i}" for i in range(40)]) == [
        word.encode() for word in printed[0]
    ]


def test_processes_that_compare_and_set_lose_no_change(folder, shared):
    each = 15 if shared else 60
    body = f"""
for i in range({each}):
    held = b""
    while True:
        number = int(held.split()[0]) + 1 if held else 1
        wanted = f"{{number}} {{name}}/{{i}}".encode()  # nobody else's
        now = store.compare_set("n", held, wanted)
        if now == wanted:
            break
        held = now
"""
    run_together(folder, shared, 4, body)
    assert int(FileStore(folder).get("n", 1.0).split()[0]) == 4 * each


def test_a_key_that_is_made_and_deleted_all_the_time_has_one_holder(folder, shared):
    """Deleting removes the key's folder, which others are about to write into."""
    each = 15 if shared else 60
    body = f"""
for i in range({each}):
    mine = f"{{name}}/{{i}}".encode()
    while store.put_new("lock", mine) != mine:
        pass
    store.set("n", str(int(store.get("n", 0.0) if store.exists("n") else b"0") + 1).encode())
    assert store.delete("lock")
"""
    run_together(folder, shared, 4, body)
    store = FileStore(folder)
    assert store.get("n", 1.0) == b"%d" % (4 * each)
    assert not store.exists("lock")
    assert temporaries_in(folder) == []


def test_a_counter_keeps_few_files_and_readers_see_it_grow(folder):
    store = FileStore(folder)
    store.add("n", 1)
    done = threading.Event()
    seen: list[list[int]] = [[], []]

    def read(numbers: list[int]) -> None:
        own = store.clone()
        while not done.is_set():
            numbers.append(int(own.get("n", 0.0)))

    readers = [threading.Thread(target=read, args=(numbers,)) for numbers in seen]
    for reader in readers:
        reader.start()
    most = 0
    try:
        for _ in range(1000):
            store.add("n", 1)
            most = max(most, len(everything_in(folder)))
    finally:
        done.set()
        for reader in readers:
            reader.join(10)
    assert all(numbers and numbers == sorted(numbers) for numbers in seen)
    assert most < 2 * COMPACT_EVERY + KEPT
    assert store.get("n", 0.0) == b"1001"


def test_large_values_do_not_pile_up(folder):
    store = FileStore(folder)
    for i in range(10):
        store.set("large", b"%d" % i * 100_000)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 150_000


# -- latecomers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "listdir", "link"])
def test_writer_that_slept_while_its_number_was_compacted_starts_again(
    monkeypatch, folder, shared, call: str
):
    """It sleeps before one of the steps of its change."""
    store = FileStore(folder, shared=shared)
    store.add("n", 1)
    others = once(lambda: [store.add("n", 1) for _ in range(MANY)])

    def delayed(*args, **kwargs):
        if call != "open" or kwargs:  # an entry is opened, not a folder
            others()
        return getattr(os, call)(*args, **kwargs)

    monkeypatch.setattr(file, "os", Meddled(**{call: delayed}))
    assert store.add("n", 1) == MANY + 2
    assert store.get("n", 0.0) == b"%d" % (MANY + 2)


def test_writer_cannot_link_while_another_compacts(monkeypatch, folder):
    """It wakes up at the last moment: when its temporary file is about to be removed."""
    store = FileStore(folder)
    store.add("n", 1)
    others = once(lambda: [store.add("n", 1) for _ in range(MANY)])
    asleep: list[Callable[[], None]] = []

    def link(source, target, **kwargs) -> None:
        if not asleep:
            asleep.append(lambda: os.link(source, target, **kwargs))
            sleepers.append(source)
            others()
            assert woken == [False]
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.link(source, target, **kwargs)

    def unlink(name, **kwargs) -> None:
        if name in sleepers and not woken:
            try:
                asleep[0]()
                woken.append(True)
            except FileExistsError:
                woken.append(False)
        os.unlink(name, **kwargs)

    sleepers: list[str] = []
    woken: list[bool] = []
    monkeypatch.setattr(file, "os", Meddled(link=link, unlink=unlink))
    assert store.add("n", 1) == MANY + 2


def test_writer_that_begins_while_another_compacts_sees_what_that_has_seen(monkeypatch, folder):
    """Its temporary file appears after temporary files are removed and before entries are."""
    store = FileStore(folder)
    store.add("n", 1)
    purged, read, compacted = threading.Event(), threading.Event(), threading.Event()
    sums: list[int] = []
    writer = threading.Thread(target=lambda: sums.append(store.add("n", 1)))

    def open_(path, flags: int, *args, **kwargs) -> int:
        if threading.current_thread() is writer and flags & os.O_CREAT:
            begun.set()
            assert purged.wait(60)
        return os.open(path, flags, *args, **kwargs)

    def link(*args, **kwargs) -> None:
        if threading.current_thread() is writer:
            read.set()
            assert compacted.wait(60)
        os.link(*args, **kwargs)

    def unlink(name, **kwargs) -> None:
        if threading.current_thread() is not writer and name.isdigit():
            purged.set()
            assert read.wait(60)
        os.unlink(name, **kwargs)

    begun = threading.Event()
    monkeypatch.setattr(file, "os", Meddled(open=open_, link=link, unlink=unlink))
    writer.start()
    assert begun.wait(60)
    for _ in range(COMPACT_EVERY - 1):
        store.add("n", 1)
    compacted.set()
    writer.join(10)
    assert sums == [COMPACT_EVERY + 1]


def test_writer_that_slept_while_its_key_was_made_anew_starts_again(monkeypatch, folder, shared):
    store = FileStore(folder, shared=shared)
    store.add("n", 5)
    others = once(lambda: (store.delete("n"), store.add("n", 100)))

    def link(*args, **kwargs) -> None:
        others()
        os.link(*args, **kwargs)

    monkeypatch.setattr(file, "os", Meddled(link=link))
    assert store.add("n", 1) == 101
    assert store.get("n", 0.0) == b"101"


def test_who_slept_while_compacting_removes_nothing_of_a_newer_key(monkeypatch, folder):
    store = FileStore(folder)
    for _ in range(COMPACT_EVERY - 1):
        store.add("n", 1)
    others = once(lambda: (store.delete("n"), [store.add("n", 1) for _ in range(3)]))

    def unlink(name, **kwargs) -> None:
        if str(name).isdigit():
            others()
        os.unlink(name, **kwargs)

    monkeypatch.setattr(file, "os", Meddled(unlink=unlink))
    assert store.add("n", 1) == COMPACT_EVERY
    assert store.get("n", 0.0) == b"3"


def test_reader_whose_entry_was_compacted_before_it_opened_it_looks_again(
    monkeypatch, folder, shared
):
    store = FileStore(folder, shared=shared)
    store.add("n", 1)
    others = once(lambda: [store.add("n", 1) for _ in range(MANY)])

    def listdir(where) -> list[str]:
        names = os.listdir(where)
        if isinstance(where, int):
            others()
        return names

    monkeypatch.setattr(file, "os", Meddled(listdir=listdir))
    assert store.get("n", 0.0) == b"%d" % (MANY + 1)


def test_reader_that_sees_no_entry_of_a_living_key_looks_again(monkeypatch, folder):
    """A listing is not atomic: it may miss what appeared late and what vanished early."""
    store = FileStore(folder)
    store.set("k", b"1")
    empty = [True]

    def listdir(where) -> list[str]:
        return [] if isinstance(where, int) and empty and empty.pop() else os.listdir(where)

    monkeypatch.setattr(file, "os", Meddled(listdir=listdir))
    assert store.get_many(["k"]) == [b"1"]


def test_half_deleted_key_is_none_and_can_be_set_again(folder, shared):
    """As left by a node that is killed after it has removed the last entry."""
    store = FileStore(folder, shared=shared)
    store.set("k", b"1")
    for path in (folder / "rally-key.k").iterdir():
        path.unlink()
    (folder / "rally-key.k" / f"{TEMPORARY}x").write_bytes(b"")
    (folder / "rally-key.k" / ".nfs0001").write_bytes(b"")
    assert store.clone().put_new("k", b"2") == b"2"
    assert store.get("k", 0.0) == b"2"


# -- an NFS client ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO, errno.ENOENT], ids=errno.errorcode.get)
def test_link_whose_answer_was_lost_counts_once(monkeypatch, folder, code: int):
    store = FileStore(folder)
    store.add("n", 1)

    def link(*args, **kwargs) -> None:
        os.link(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(file, "os", Meddled(link=link))
    assert store.add("n", 1) == 2
    assert store.put_new("n", b"x") == b"2"


@pytest.mark.parametrize(
    "code", [errno.ENOENT, errno.ENOTEMPTY, errno.EIO], ids=errno.errorcode.get
)
def test_rename_whose_answer_was_lost_counts_once(monkeypatch, folder, shared, code: int):
    store = FileStore(folder, shared=shared)

    def rename(*args, **kwargs) -> None:
        os.rename(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(file, "os", Meddled(rename=rename))
    assert store.add("n", 1) == 1
    assert store.get("n", 0.0) == b"1"
    assert temporaries_in(folder) == []


def failing(times: int, code: int) -> Callable[..., int]:
    """An ``os.open`` that fails for an entry this many times."""
    left = [None] * times

    def call(path, *args, **kwargs) -> int:
        if str(path).isdigit() and left:
            left.pop()
            raise OSError(code, os.strerror(code))
        return os.open(path, *args, **kwargs)

    return call


def test_stale_handle_is_tried_again(monkeypatch, folder):
    store = FileStore(folder)
    store.set("k", b"1")
    monkeypatch.setattr(file, "os", Meddled(open=failing(3, errno.ESTALE)))
    assert store.get("k", 0.0) == b"1"
    monkeypatch.setattr(file, "os", Meddled(open=failing(3, errno.ESTALE)))
    store.set("k", b"2")
    assert store.get("k", 0.0) == b"2"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ESTALE, "Stale file handle"),
        (errno.EIO, "Input/output error"),
        (
            errno.ETIMEDOUT,
            "timed out",
        ),  # as from a soft mount; not a TimeoutError of get()
    ],
)
def test_broken_mount_is_one_line_that_names_folder_and_operation(
    monkeypatch, folder, code: int, says: str
):
    store = FileStore(folder)
    store.set("some/key", b"1")
    monkeypatch.setattr(file, "os", Meddled(open=failing(1000, code)))
    for operation, call in {
        "read 'some/key'": lambda: store.get("some/key", 5.0),
        "set 'some/key'": lambda: store.set("some/key", b"2"),
        "add to 'some/key'": lambda: store.add("some/key", 2),
        "delete 'some/key'": lambda: store.delete("some/key"),
    }.items():
        with pytest.raises(RendezvousConnectionError) as caught:
            call()
        text = str(caught.value)
        assert text.startswith(f"the job's store in {folder} cannot {operation}: ")
        assert says in text and "is the file server up" in text and "\n" not in text
    monkeypatch.undo()
    assert store.get("some/key", 0.0) == b"1"
    assert temporaries_in(folder) == []


def test_entry_that_lost_its_end_is_an_error(folder):
    store = FileStore(folder)
    store.set("k", b"value")
    path = folder / "rally-key.k" / "1"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RendezvousConnectionError, match="cannot read 'k': entry 1 is damaged"):
        store.get("k", 1.0)


class RemembersForEver:
    """``os`` on an NFS client that forgets nothing it knows of a folder until it changes the folder itself."""

    def __init__(self) -> None:
        self.listings: dict[int, list[str]] = {}
        self.missing: dict[str, set[str]] = {}

    def __getattr__(self, name: str):
        return getattr(os, name)

    def forget(self, path, dir_fd: int | None) -> None:
        where = os.path.dirname(path) if dir_fd is None else dir_fd
        self.listings.pop(os.stat(where).st_ino, None)
        self.missing.pop(os.path.realpath(f"/proc/self/fd/{where}" if dir_fd else where), None)

    def listdir(self, where) -> list[str]:
        return self.listings.setdefault(os.stat(where).st_ino, os.listdir(where))

    def open(self, path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            self.forget(path, dir_fd)
        elif dir_fd is None:
            missing = self.missing.setdefault(os.path.dirname(path), set())
            if not os.path.lexists(path):
                missing.add(path)
            if path in missing:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def symlink(self, target, name, *, dir_fd: int | None = None) -> None:
        self.forget(name, dir_fd)
        os.symlink(target, name, dir_fd=dir_fd)

    def unlink(self, name, *, dir_fd: int | None = None) -> None:
        self.forget(name, dir_fd)
        os.unlink(name, dir_fd=dir_fd)

    def mkdir(self, path, mode: int) -> None:
        self.forget(path, None)
        os.mkdir(path, mode)


def test_client_that_remembers_listings_and_missing_names_sees_changes_at_once(
    monkeypatch, folder, shared
):
    store, other = FileStore(folder, shared=shared), FileStore(folder)
    client = RemembersForEver()

    def here(call: Callable[[], object]) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(file, "os", client)
            return call()

    assert here(lambda: store.exists("k")) is False
    other.set("k", b"1")
    if not shared:  # or the test would show nothing
        assert here(lambda: store.exists("k")) is False
        return
    assert here(lambda: store.exists("k")) is True
    assert here(lambda: store.get_many(["k", "later"])) == [b"1", None]
    other.set("later", b"2")
    assert here(lambda: store.get_many(["k", "later"])) == [b"1", b"2"]
    for i in range(MANY):  # a heartbeat, across compactions
        assert other.add("beat", 1) == 2 * i + 1
        assert here(lambda: store.get("beat", 0.0)) == b"%d" % (2 * i + 1)
        assert other.add("beat", 1) == 2 * i + 2
        assert here(lambda: store.get("beat", 0.0)) == b"%d" % (2 * i + 2)
    for i in range(2 * MANY, 3 * MANY, 2):
        assert here(lambda: store.add("beat", 1)) == i + 1
        assert other.add("beat", 1) == i + 2
    assert here(lambda: store.delete("last")) is False
    other.set("last", b"3")
    assert here(lambda: store.delete("last")) is True
    assert not other.exists("last")


# -- keys ---------------------------------------------------------------------------------------------

ANY_CHARACTER = st.characters(exclude_categories=())  # lone surrogates too
HOSTILE = [
    "",
    ".",
    "..",
    "../..",
    "../../x",
    "/",
    "/etc/passwd",
    "a//b",
    "%2e%2e",
    "%",
    "\0",
    "\n",
    "~",
]
KEYS = st.one_of(
    st.text(ANY_CHARACTER, max_size=40),
    st.text(ANY_CHARACTER, max_size=10).map(lambda text: (text + "é") * 512).map(lambda s: s[:512]),
    st.text("./\\%\0~ aA0", max_size=40),
    st.sampled_from(HOSTILE),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(KEYS, min_size=1, max_size=6, unique=True))
@example(HOSTILE)
@example(["/", "%2F", "%252F", "a b", "a+b", "a%20b"])
@example(["x" * 512, "x" * 511 + "y", "x" * 511, "x" * 245, "x" * 244])
def test_any_keys_stay_apart_and_inside_the_folder(keys: list[str]):
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "store")
        store = FileStore(folder)
        for i, key in enumerate(keys):
            assert store.put_new(key, b"%d" % i) == b"%d" % i
        assert store.get_many(keys) == [b"%d" % i for i in range(len(keys))]
        assert os.listdir(parent) == ["store"]
        assert len(os.listdir(folder)) == len(keys)
        assert all(len(os.fsencode(name)) <= 255 for name in os.listdir(folder))
        assert [store.delete(key) for key in keys] == [True] * len(keys)
        assert os.listdir(folder) == []


def test_a_key_is_a_value_and_a_level(folder):
    store = FileStore(folder)
    store.set("a", b"1")
    store.set("a/b", b"2")
    store.add("a/b/1", 3)
    assert store.get_many(["a", "a/b", "a/b/1", "a/"]) == [b"1", b"2", b"3", None]
    assert store.delete("a")
    assert store.get_many(["a", "a/b"]) == [None, b"2"]


def test_values_and_counters_are_of_one_kind(folder):
    store = FileStore(folder)
    assert isinstance(store, ComparingStore)
    store.set("n", b"41")
    assert store.add("n", 1) == 42
    assert store.compare_set("n", b"42", b"7") == b"7"
    assert store.compare_set("n", b"42", b"8") == b"7"
    assert store.add("n", -9) == -2
    assert store.compare_set("none", b"x", b"y") == b"x"
    assert not store.exists("none")
    assert store.compare_set("none", b"", b"y") == b"y"
    store.set("text", b"no number")
    with pytest.raises(ValueError, match="no number"):
        store.add("text", 1)
    assert store.get("text", 0.0) == b"no number"
    assert temporaries_in(folder) == []


# -- ends ---------------------------------------------------------------------------------------------


def test_closing_ends_a_wait_and_leaves_clones(folder):
    store = FileStore(folder)
    other = store.clone()
    timer = threading.Timer(0.2, store.close)
    timer.start()
    before = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match="is closed"):
        store.get("never", 30.0)
    assert time.monotonic() - before < 20 * pace()
    timer.join()
    store.close()
    with pytest.raises(RendezvousConnectionError, match="is closed"):
        store.add("n", 1)
    assert other.add("n", 1) == 1


def test_store_that_is_removed_ends_the_waits_of_others(folder, shared):
    store = FileStore(folder, shared=shared)
    store.set("k", b"1")
    timer = threading.Timer(0.2, FileStore(folder).remove)
    timer.start()
    with pytest.raises(RendezvousConnectionError, match=r"cannot read.*: the folder was removed"):
        store.get("never", 30.0)
    timer.join()
    assert not folder.exists()
    for call in (
        lambda: store.set("k", b"2"),
        lambda: store.add("m", 1),
        lambda: store.exists("k"),
    ):
        with pytest.raises(RendezvousConnectionError, match="the folder was removed"):
            call()
    store.remove()
    assert not folder.exists()


def test_removing_leaves_what_is_not_the_stores(folder):
    folder.mkdir()
    (folder / "notes").write_text("mine")
    store = FileStore(folder)
    store.set("k", b"1")
    store.set("x" * 500, b"1")
    (folder / f"{TEMPORARY}left").mkdir()
    store.remove()
    assert everything_in(folder) == ["notes"]


KILLED = """
import sys
from rallypoint.rendezvous.backends.file_store import FileStore
store = FileStore(sys.argv[1], shared=False)
i = 0
while True:
    i += 1
    print(store.add("n", 1), flush=True)
    store.set("large", b"%d " % (1000 + i) * 4000)
    store.set("small", b"%d " % (1000 + i) * 4)
    store.put_new(f"new/{i % 3}", b"new")
    store.delete(f"new/{(i + 1) % 3}")
"""


def test_process_killed_while_it_writes_leaves_a_whole_store(folder):
    store = FileStore(folder)
    before = 0
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE, text=True
        ) as process:
            first = process.stdout.readline()
            time.sleep(random.uniform(0, 0.04))
            process.send_signal(signal.SIGKILL)
            told = [int(line) for line in [first, *process.stdout] if line.endswith("\n")]
        assert told[0] in (before + 1, before + 2)  # the second if the kill hit an answer
        held = int(store.get("n", 1.0))
        assert held in (told[-1], told[-1] + 1)
        before = told[-1]
        for key, times in {"large": 4000, "small": 4}.items():
            value = store.get_many([key])[0]
            words = [] if value is None else value.split()
            assert len(words) in (0, times) and len(set(words)) <= 1
        for i in range(3):
            assert store.get_many([f"new/{i}"])[0] in (None, b"new")
            store.set(f"new/{i}", b"new")
    # Each kill can leave one temporary file behind, until the key is compacted or the store removed.
    assert len(temporaries_in(folder)) <= 2 * 20
    store.remove()
    assert not folder.exists()


# -- disks and permissions ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a file system")
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=40,mode=700", "tmpfs", str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=False, capture_output=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(bytes(free.f_bavail * free.f_frsize))
    return filler


def use_up_inodes(disk: Path) -> Path:
    folder = disk / "many"
    folder.mkdir()
    for i in range(os.statvfs(disk).f_ffree):
        (folder / str(i)).symlink_to("x")
    return folder


def test_full_disk_is_told_and_passes(small_disk: Path, shared):
    folder = small_disk / "store"
    store = FileStore(folder, shared=shared)
    store.add("n", 1)
    store.set("k", b"old")
    before = everything_in(folder)
    for key in ("k", "new"):
        with pytest.raises(RendezvousConnectionError) as caught:
            store.set(key, b"x" * 100_000)  # the first part of it is written
        assert str(caught.value) == (
            f"the job's store in {folder} cannot set '{key}': No space left on device;"
            " make room there, or raise the quota"
        )
        assert everything_in(folder) == before
    for make_full in (fill, use_up_inodes):
        rubbish = make_full(small_disk)
        for call in (
            lambda: store.add("n", 1),
            lambda: store.set("new", b"1"),
            lambda: store.put_new("new", b"1"),
            lambda: store.compare_set("k", b"old", b"new"),
        ):
            with pytest.raises(RendezvousConnectionError, match="No space left on device"):
                call()
        assert everything_in(folder) == before
        assert store.get_many(["n", "k", "new"]) == [b"1", b"old", None]
        shutil.rmtree(rubbish) if rubbish.is_dir() else rubbish.unlink()
    assert store.add("n", 1) == 2
    assert store.put_new("new", b"1") == b"1"
    assert store.compare_set("k", b"old", b"new") == b"new"


def test_folder_on_a_disk_that_is_full_already(small_disk: Path):
    use_up_inodes(small_disk)
    with pytest.raises(
        RendezvousConnectionError, match=r"disk/store cannot be made: No space left"
    ):
        FileStore(small_disk / "store")


def test_folder_is_this_users_alone(folder):
    store = FileStore(folder)
    store.set("k", b"1")
    store.add("n", 1)
    modes = {path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")] if path.is_dir()}
    assert modes == {0o700}
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*/*")} == {0o600}


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        FileStore(folder)
    text = str(caught.value)
    assert text.startswith(f"store folder '{folder}': ")
    assert "a folder of the job's own" in text and "\n" not in text
    return text


def test_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refusal(tmp_path / "file")
    assert "is not a folder" in refusal(tmp_path / "file" / "store")
    assert "cannot be made: No such file" in refusal(Path("/proc/nope"))


def test_folder_that_everybody_may_write_to_is_refused(tmp_path):
    for mode in (0o777, 0o1777):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        text = refusal(folder)
        assert "everyone can write to it" in text
        assert f"chmod o-w {folder}" in text
        assert everything_in(folder) == []
    folder.chmod(0o770)
    FileStore(folder)


def test_folder_of_another_user_is_refused(folder):
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    text = refusal(folder)
    assert "belongs to uid 12345, and the files of this process to user root" in text
    assert "run all nodes as one user" in text
    assert everything_in(folder) == []


def test_folder_that_may_not_be_written_to_is_refused(tmp_path):
    def without_privileges() -> None:
        """In the child, make permissions hold for root too."""
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (DAC_OVERRIDE, DAC_READ_SEARCH):
            assert libc.prctl(24, capability, 0, 0, 0) == 0, "PR_CAPBSET_DROP"

    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    program = """
import sys
from rallypoint.errors import ConfigError
from rallypoint.rendezvous.backends.file_store import FileStore
for folder in sys.argv[1:]:
    try:
        FileStore(folder)
    except ConfigError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, closed, closed / "store"],
        preexec_fn=without_privileges if os.geteuid() == 0 else None,
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    assert done.stderr == ""
    written, made = done.stdout.splitlines()
    assert written.startswith(f"store folder '{closed}': cannot be written to: Permission denied")
    assert made.startswith(f"store folder '{closed}/store': cannot be made: Permission denied")
    assert "a folder of the job's own" in written and "a folder of the job's own" in made


def test_file_system_without_hard_links_is_refused(monkeypatch, folder):
    def link(*args, **kwargs) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(file, "os", Meddled(link=link))
    with pytest.raises(ConfigError, match="its file system has no hard links"):
        FileStore(folder)
    assert everything_in(folder) == []


def test_only_known_file_systems_count_as_local(tmp_path):
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    assert file._is_local("/dev/shm")
    assert not file._is_local("/proc")


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT])
def test_a_file_server_that_does_not_answer_is_waited_for(folder, monkeypatch, code: int) -> None:
    """And not taken for a folder that cannot be used."""
    left = [3]
    make = os.makedirs

    def makedirs(*words: object, **more: object) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        make(*words, **more)

    monkeypatch.setattr(os, "makedirs", makedirs)
    for _ in range(3):
        with pytest.raises(RendezvousConnectionError, match="cannot be made"):
            FileStore(folder)
    FileStore(folder).close()
