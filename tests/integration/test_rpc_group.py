"""Groups over real stores: what all see, what dies halfway, what a join costs."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import supervisors
from pace import pace
from rallypoint._core import resolver
from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, DeadlineExceeded, RpcError
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.c10d import c10d_store
from rallypoint.rpc import Device, NodeDevices
from rallypoint.rpc.groups import membership
from rallypoint.rpc.groups.dynamic_group import DynamicGroup
from rallypoint.rpc.groups.group import Group
from rallypoint.rpc.groups.group_store import Calls
from rallypoint.rpc.groups.member import Member, dump
from rallypoint.rpc.groups.signing import PUBLIC, Signer
from rallypoint.rpc.groups.static_group import StaticGroup
from rallypoint.testing import ManualClock


pytestmark = pytest.mark.integration

KINDS = ["tcp", "tcp-old", "file", "hash", "memory"]


class Place:
    """A store that several processes would open. Each ``open()`` returns the object of one process."""

    def __init__(self, kind: str, folder: Any) -> None:
        self.kind = kind
        self.made: list[Any] = []
        self.folder = folder
        if kind.startswith("tcp"):
            self.server = dist.TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
                use_libuv=kind == "tcp",
                timeout=timedelta(seconds=20),
            )
        elif kind == "hash":
            self.server = dist.HashStore()
        elif kind == "memory":
            self.server = MemoryStore()

    def bare(self) -> Any:
        match self.kind:
            case "tcp" | "tcp-old":
                return dist.TCPStore(
                    "127.0.0.1",
                    self.server.port,
                    is_master=False,
                    wait_for_workers=False,
                    use_libuv=self.kind == "tcp",
                    timeout=timedelta(seconds=20),
                )
            case "file":
                return dist.FileStore(str(self.folder / "store"), -1)
            case "hash":
                return self.server
            case _:
                store = c10d_store(self.server.clone(), 20)
                self.made.append(store)
                return store

    def open(self) -> Any:
        with resolver.without_name_servers():
            return dist.PrefixStore("group", self.bare())

    def close(self) -> None:
        for store in self.made:
            store.close()


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Place]:
    made = Place(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture
def tcp(tmp_path: Any) -> Place:
    return Place("tcp", tmp_path)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    eventually(lambda: threading.active_count() <= before)


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def member(name: str, rank: int = 0, **more: Any) -> Member:
    return Member(name=name, id=rank, incarnation=os.urandom(8).hex(), pid=os.getpid(), **more)


@contextlib.contextmanager
def closing(*groups: Group) -> Iterator[None]:
    try:
        yield
    finally:
        for group in groups:
            group.close()


def names(group: Group) -> list[str]:
    return [each.name for each in group.members()[1]]


class Counting:
    """A store that counts its calls."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if not callable(value) or name in ("has_extended_api", "clone"):
            return value

        def counted(*args: Any) -> Any:
            self.calls[name] += 1
            return value(*args)

        return counted


def form_all(
    place: Place, members: list[Member], size: int | None = None, timeout: float = 10.0
) -> list[Any]:
    """What each process gets: a group, or an error."""

    def one(me: Member) -> Any:
        try:
            return StaticGroup.form(place.open(), me, size or len(members), timeout)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


# -- static ---------------------------------------------------------------------------------------


def test_a_static_group_is_the_same_for_all(place: Place) -> None:
    groups = form_all(place, [member(f"w{rank}", rank) for rank in range(4)])
    assert len({group.members() for group in groups}) == 1
    group = groups[1]
    assert isinstance(group, Group) and group.is_static and group.epoch == 1
    assert names(group) == ["w0", "w1", "w2", "w3"]
    assert group.me.name == "w1" and group.find("w2") == group.find(2)
    for unknown in ("x", 4, -1):
        with pytest.raises(RuntimeError, match="could not find destination"):
            group.find(unknown)
    groups[2].leave("done")
    # A TCPStore's set is not answered: another's read may overtake it.
    eventually(lambda: group.last_words(group.find(2)) == "done")
    assert group.last_words(group.find(3)) is None


def test_a_second_process_of_a_rank_is_told_at_once(tcp: Place) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(StaticGroup.form, tcp.open(), member("a", 0), 2, 10.0)
        eventually(lambda: tcp.open().check(["rpc/rank/0"]))
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 0 is taken by 'a'"):
            StaticGroup.form(tcp.open(), member("b", 0), 2, 10.0)
        assert time.monotonic() - began < 2 * pace()
        StaticGroup.form(tcp.open(), member("b", 1), 2, 10.0)
        assert names(first.result()) == ["a", "b"]


def test_a_fault_of_one_member_is_the_same_error_on_all(tcp: Place, tmp_path: Any) -> None:
    errors = form_all(tcp, [member("a", 0), member("b", 1), member("a", 2)])
    assert all(isinstance(each, RuntimeError) and "is not unique" in str(each) for each in errors)
    maps = {"b": {Device("cuda", 0): Device("cuda", 0), Device("cuda", 1): Device("cuda", 0)}}
    wrong = member("a", 0, devices=NodeDevices(counts={"cuda": 2}, maps=maps))
    errors = form_all(Place("tcp", tmp_path), [wrong, member("b", 1)])
    assert len({str(each) for each in errors}) == 1
    assert all(isinstance(each, ConfigError) for each in errors)
    assert "Node a has duplicated target devices" in str(errors[0])


def test_a_wait_for_less_than_a_millisecond_ends(place: Place) -> None:
    # c10d takes zero milliseconds for no limit.
    calls = Calls(place.open())
    ended = threading.Event()
    waits = threading.Thread(
        target=lambda: (calls.wait(["nobody"], 0.0004), ended.set()), daemon=True
    )
    waits.start()
    assert ended.wait(20)


def test_waiting_for_a_late_member_is_quiet(tcp: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """c10d prints a warning for each wait that ends without its key."""
    late = threading.Timer(0.8, lambda: tcp.open().set("rpc/late", b"here"))
    late.start()
    assert Calls(tcp.open()).wait_interruptibly(["late"], 60)
    late.join()
    assert capfd.readouterr().err == ""


def test_who_never_came_is_named_and_the_rank_is_free_again(place: Place) -> None:
    errors = form_all(place, [member("a", 0), member("c", 2)], size=4, timeout=1.0)
    assert all(isinstance(each, DeadlineExceeded) for each in errors)
    assert any("missing: rank 1, 3;" in str(each) for each in errors)
    assert not any(place.open().check([f"rpc/rank/{rank}"]) for rank in range(4))
    again = form_all(place, [member(name, rank) for rank, name in enumerate("abcd")])
    assert [names(each) for each in again] == [list("abcd")] * 4


def test_nobody_goes_on_with_a_member_that_gave_up(tcp: Place) -> None:
    given_up, late = member("a", 0), member("b", 1)
    store = tcp.open()
    record = dump({"v": 1, "world_size": 2, "member": given_up.body()}, "member")
    store.set("rpc/rank/0", PUBLIC.sign("rank/0", record))
    seal = PUBLIC.sign("formed", b"given up by " + given_up.incarnation.encode())

    class GivesUp(Counting):  # the other, between our read and our seal
        def multi_get(self, keys: list[str]) -> Any:
            values = store.multi_get(keys)
            store.compare_set("rpc/formed", b"", seal)
            return values

    with pytest.raises(DeadlineExceeded, match=r"'a' \(rank 0, .* gave up"):
        StaticGroup.form(GivesUp(store), late, 2, 10.0)
    assert not store.check(["rpc/rank/1"])
    store.delete_key("rpc/rank/0")
    again = form_all(tcp, [member("a", 0), member("b", 1)])  # what is left of it does no harm
    assert [names(each) for each in again] == [["a", "b"]] * 2


def test_the_kinds_do_not_mix(tcp: Place, tmp_path: Any) -> None:
    words = "mixes statically and dynamically initialized members"
    StaticGroup.form(tcp.open(), member("a", 0), 1, 5.0)
    with pytest.raises(RuntimeError, match=words):
        DynamicGroup.join(tcp.open(), member("b"), 1, 5.0)
    other = Place("tcp", tmp_path)
    with closing(DynamicGroup.join(other.open(), member("a"), 0, 5.0)):
        with pytest.raises(RuntimeError, match=words):
            StaticGroup.form(other.open(), member("b", 1), 2, 5.0)


def test_members_that_disagree_on_the_size_are_told(tcp: Place) -> None:
    with ThreadPoolExecutor() as pool:
        small = pool.submit(StaticGroup.form, tcp.open(), member("a", 0), 2, 5.0)
        large = pool.submit(StaticGroup.form, tcp.open(), member("b", 1), 3, 2.0)
        with pytest.raises(ConfigError, match="rank 0: 2, rank 1: 3"):
            small.result()
        with pytest.raises(DeadlineExceeded, match="missing: rank 2"):
            large.result()


def test_forming_costs_the_same_number_of_calls_whatever_the_size(tcp: Place) -> None:
    def cost(size: int) -> set[int]:
        stores = [Counting(dist.PrefixStore(f"{size}", tcp.open())) for _ in range(size)]
        everyone = [(stores[rank], member(f"w{rank}", rank)) for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(lambda each: StaticGroup.form(*each, size, 10.0), everyone))
        return {store.calls.total() for store in stores}

    assert [cost(1), cost(12)] == [{6}, {6}]


# -- dynamic --------------------------------------------------------------------------------------


def test_joins_and_leaves_are_heard_of_in_the_same_order_by_all(place: Place) -> None:
    first = DynamicGroup.join(place.open(), member("a"), None, 5.0)
    news: list[tuple[str, str]] = []
    assert [each.name for each in first.on_join(lambda m: news.append(("+", m.name)))[1]] == ["a"]
    first.on_leave(lambda m, why: news.append(("-" + why, m.name)))
    b = DynamicGroup.join(place.open(), member("b"), 5, 5.0)
    c = DynamicGroup.join(place.open(), member("c"), None, 5.0)
    with closing(first, b, c):
        assert (b.me.id, c.me.id) == (5, 6)
        assert c.epoch == 3 and names(c) == ["a", "b", "c"] and c.find(5) == b.me
        b.leave("tired")
        assert names(b) == ["a", "c"]
        c.report_lost(first.me, "silent")
        c.report_lost(first.me, "silent again")
        eventually(lambda: len(news) == 4)
        assert news == [("+", "b"), ("+", "c"), ("-tired", "b"), ("-silent", "a")]
        assert first.last_words(b.me) == "tired" and first.members() == c.members()
        assert c.epoch == 5
        with pytest.raises(RuntimeError, match="could not find destination 'a'; the group has 'c'"):
            c.find("a")
        with closing(DynamicGroup.join(place.open(), member("a"), 0, 5.0)) as _:
            assert c.find("a").id == 0  # the name is free again, and found by reading on


def test_what_another_thread_has_read_between_two_waits_is_told_at_once(tcp: Place) -> None:
    first = DynamicGroup.join(tcp.open(), member("a"), 0, 5.0)
    heard: list[str] = []
    others: list[DynamicGroup] = []
    met: list[bool] = []
    is_member = first._is_member

    def amid() -> bool:  # the watcher has told all it knew, and does not wait yet
        if heard == ["b"] and not met:
            met.append(True)
            others.append(DynamicGroup.join(tcp.open(), member("c"), 2, 5.0))
            first._read_on()
        return is_member()

    first._is_member = amid  # type: ignore[method-assign]
    with closing(first):
        first.on_join(lambda m: heard.append(m.name))
        others.append(DynamicGroup.join(tcp.open(), member("b"), 1, 5.0))
        try:
            eventually(lambda: heard == ["b", "c"])
        finally:
            for each in others:
                each.close()


def test_the_second_of_a_name_or_rank_does_not_get_in(place: Place) -> None:
    with closing(DynamicGroup.join(place.open(), member("a"), 0, 5.0)):
        for second, rank, words in (
            (member("a"), None, "is not unique"),
            (member("b"), 0, "rank 0 is taken by 'a'"),
        ):
            with pytest.raises(RuntimeError, match=words):
                DynamicGroup.join(place.open(), second, rank, 5.0)
        assert place.open().add("rpc/next", 0) == 1  # nothing was written


def test_of_many_at_once_with_one_name_one_gets_in(tcp: Place) -> None:
    def one(_: int) -> Any:
        try:
            return DynamicGroup.join(tcp.open(), member("a"), None, 10.0)
        except RpcError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(8)))
    groups = [each for each in results if isinstance(each, DynamicGroup)]
    with closing(*groups):
        assert len(groups) == 1
        assert all("is not unique" in str(each) for each in results if each not in groups)


def test_device_maps_that_do_not_go_together_keep_the_newcomer_out(tcp: Place) -> None:
    maps = {"a": {Device("cuda", 0): Device("cuda", 3)}}
    wrong = member("b", devices=NodeDevices(counts={"cuda": 1}, maps=maps))
    with closing(first := DynamicGroup.join(tcp.open(), member("a"), 0, 5.0)):
        with pytest.raises(ConfigError, match="target devices with invalid indices"):
            DynamicGroup.join(tcp.open(), wrong, 1, 5.0)
        assert first.epoch == 1


def test_waiting_for_a_name_ends_when_it_comes_and_says_who_is_missing(place: Place) -> None:
    with closing(first := DynamicGroup.join(place.open(), member("a"), 0, 5.0)):
        with pytest.raises(
            DeadlineExceeded, match=r"x, y not in the group .* \(members at epoch \d+: a\)"
        ):
            first.wait_for(["x", "a", "y"], 0.2)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(first.wait_for, ["c", "a"], 10.0)
            time.sleep(0.05)
            third = DynamicGroup.join(place.open(), member("c"), 2, 5.0)
            with closing(third):
                assert [each.name for each in waiting.result(5)] == ["c", "a"]


def test_a_callback_that_fails_or_closes_does_not_stop_the_others(tcp: Place) -> None:
    first = DynamicGroup.join(tcp.open(), member("a"), 0, 5.0)
    heard: list[str] = []
    with closing(first):
        first.on_join(lambda _: 1 / 0)
        first.on_join(lambda m: heard.append(m.name))
        first.on_join(lambda m: first.close() if m.name == "c" else None)
        with closing(
            DynamicGroup.join(tcp.open(), member("b"), 1, 5.0),
            DynamicGroup.join(tcp.open(), member("c"), 2, 5.0),
        ):
            eventually(lambda: heard == ["b", "c"])


def test_who_reports_and_dies_does_not_keep_the_lost_one_in(place: Place) -> None:
    a = DynamicGroup.join(place.open(), member("a"), 0, 5.0)
    b = DynamicGroup.join(place.open(), member("b"), 1, 5.0)
    with closing(a, b):
        # A report by another member, which died before it made its journal entry.
        place.open().set(f"rpc/gone/1/{b.me.incarnation}", "somebody")
        a.report_lost(b.me, "silent")
        assert names(a) == ["a"]


def test_many_reports_of_one_death_are_one_entry(tcp: Place) -> None:
    # A second of this clock takes a minute, so nobody who has to be waited for is given up.
    clock = ManualClock(rate=1 / 60)
    groups = [DynamicGroup.join(tcp.open(), member(f"w{i}"), i, 5.0, clock=clock) for i in range(6)]
    with closing(*groups):
        for group in groups:
            group.find("w5")  # it knows whom it is to report
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda group: group.report_lost(groups[5].me, "gone"), groups[:5]))
        assert all(names(group) == [f"w{i}" for i in range(5)] for group in groups[:5])
        assert tcp.open().add("rpc/next", 0) == 7


def test_a_closed_group_leaves_no_thread_and_no_descriptor(place: Place) -> None:
    warm = DynamicGroup.join(place.open(), member("warm"), None, 5.0)
    warm.leave()
    warm.close()
    del warm
    store = place.open()
    store.add("warm", 0)  # the server, in this process, has accepted it by now
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for leaving in (True, False):
        group = DynamicGroup.join(store, member("a" if leaving else "b"), None, 5.0)
        time.sleep(0.05)  # its watcher waits by now
        if leaving:
            group.leave()
        began = time.monotonic()
        group.close()
        group.close()
        assert time.monotonic() - began < 1.0 * pace()
        assert threading.active_count() == threads
        del group
    eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_closed_group_lets_go_of_its_store(kind: str, tcp: Place) -> None:
    """What an agent leaves behind refers to itself, so it is there until the next collection."""
    tcp.open().add("warm", 0)
    before = len(os.listdir("/proc/self/fd"))
    if kind == "static":
        group: Group = StaticGroup.form(tcp.open(), member("a"), 1, 5.0)
    else:
        group = DynamicGroup.join(tcp.open(), member("a"), None, 5.0)
    group.leave()
    group.close()
    # Fewer, if the server had not yet closed its end of the first connection.
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    with pytest.raises(RpcError, match="this worker has left the group"):
        group.leave() if kind == "static" else group.find("b")


def test_a_store_that_stands_still_does_not_hold_up_closing(tmp_path: Any) -> None:
    server = start(
        """
        import sys, torch.distributed as dist
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        print(store.port, flush=True)
        sys.stdin.read()
        """
    )
    with server:
        port = int(server.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        group = DynamicGroup.join(store, member("a"), None, 5.0)
        server.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        group.close()
        assert time.monotonic() - began < 2.0 * pace()
        server.kill()


def test_a_store_that_ends_is_noticed_and_said(tmp_path: Any, caplog: Any) -> None:
    server = start(
        """
        import sys, torch.distributed as dist
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        print(store.port, flush=True)
        sys.stdin.read()
        """
    )
    with server:
        port = int(server.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        group = DynamicGroup.join(store, member("a"), None, 5.0)
        server.kill()
        eventually(lambda: "changes of the group are no longer seen" in caplog.text)
        with pytest.raises(RpcError, match="the group's store is lost"):
            group.find("b")
        assert group.find("a") == group.me  # what is known stays known
        group.close()


# -- death halfway --------------------------------------------------------------------------------


def start(program: str, *args: str) -> subprocess.Popen[str]:
    return supervisors.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# Joins, and stops when it has taken its place in the journal but has not written anything there yet.
STOPS_IN_THE_MIDDLE = """
import os, sys, threading, torch.distributed as dist
from rallypoint.rpc.groups.dynamic_group import DynamicGroup
from rallypoint.rpc.groups.member import Member
kind, where, name = sys.argv[1:]
if kind == "file":
    bare = dist.FileStore(where, -1)
else:
    bare = dist.TCPStore("127.0.0.1", int(where), is_master=False, wait_for_workers=False)
class Stops:
    def __init__(self, store): self.store = store
    def __getattr__(self, name): return getattr(self.store, name)
    def add(self, key, amount):
        number = self.store.add(key, amount)
        if amount and not self.stopped:
            self.stopped = True
            print("in the middle", flush=True)
            sys.stdin.readline()
        return number
    stopped = False
store = Stops(dist.PrefixStore("group", bare))
group = DynamicGroup.join(store, Member(name=name, id=0, incarnation="%016x" % os.getpid()), None, 20)
print(group.epoch, group.me.id, flush=True)
sys.stdin.readline()
group.leave()
group.close()
"""


def in_the_middle(place: Place, name: str) -> subprocess.Popen[str]:
    where = str(place.folder / "store") if place.kind == "file" else str(place.server.port)
    process = start(STOPS_IN_THE_MIDDLE, place.kind, where, name)
    assert process.stdout.readline() == "in the middle\n"
    return process


@pytest.mark.parametrize("place", ["tcp", "file"], indirect=True)
def test_a_joiner_killed_in_the_middle_blocks_nobody(place: Place) -> None:
    first = DynamicGroup.join(place.open(), member("a"), None, 5.0)
    with closing(first), in_the_middle(place, "dead") as dead:
        dead.kill()
        dead.wait()
        began = time.monotonic()
        second = DynamicGroup.join(place.open(), member("dead"), None, 5.0)  # the name is not taken
        took = time.monotonic() - began
        with closing(second):
            assert 0.8 < took < 5.0 * pace()
            assert second.epoch == 3 and second.me.id == 1
            eventually(lambda: first.members() == second.members(), 2.0)
            began = time.monotonic()
            with closing(DynamicGroup.join(place.open(), member("c"), None, 5.0)):
                assert time.monotonic() - began < 0.8 * pace()  # one wait for one hole


@pytest.mark.parametrize("place", ["tcp", "file"], indirect=True)
def test_a_joiner_that_was_only_slow_takes_another_place(place: Place) -> None:
    with in_the_middle(place, "slow") as slow:
        first = DynamicGroup.join(place.open(), member("a"), None, 5.0)  # fills place 1
        with closing(first):
            assert first.epoch == 2
            slow.stdin.write("\n")
            slow.stdin.flush()
            assert slow.stdout.readline() == "3 1\n"
            assert first.wait_for(["slow"], 5.0)[0].id == 1
            slow.communicate("\n", timeout=10)
        assert slow.returncode == 0


def test_a_hole_behind_which_the_next_writer_dies_is_filled_by_who_waits(tcp: Place) -> None:
    with closing(first := DynamicGroup.join(tcp.open(), member("a"), None, 5.0)):
        time.sleep(0.05)  # its watcher waits for entry 2
        store = tcp.open()
        hole, number = store.add("rpc/next", 1), store.add("rpc/next", 1)
        assert (hole, number) == (2, 3)
        orphan = membership.encode(membership.Join(member("b", 1)))
        store.compare_set("rpc/entry/3", b"", PUBLIC.sign("entry/3", orphan))
        assert first.wait_for(["b"], 6.0)[0].id == 1
        assert first.epoch == 3


@pytest.mark.parametrize(
    "written",
    [
        b"\xff garbage",
        PUBLIC.sign("entry/2", b"{}"),
        PUBLIC.sign("entry/7", membership.encode(membership.VOID)),
        membership.encode(membership.Join(member("stranger", 1))),
        Signer(b"another group's secret", "x").sign(
            "entry/2", membership.encode(membership.Join(member("stranger", 1)))
        ),
    ],
)
def test_what_is_no_entry_counts_as_nothing(tcp: Place, written: bytes) -> None:
    with closing(first := DynamicGroup.join(tcp.open(), member("a"), None, 5.0)):
        store = tcp.open()
        store.set(f"rpc/entry/{store.add('rpc/next', 1)}", written)
        with closing(second := DynamicGroup.join(tcp.open(), member("b"), None, 5.0)):
            assert second.epoch == 3
            eventually(lambda: first.members() == second.members())


# -- what a join costs ----------------------------------------------------------------------------


def test_a_join_costs_the_same_however_long_the_journal_is(tcp: Place) -> None:
    store = Counting(tcp.open())
    costs, took = [], []
    with contextlib.ExitStack() as stack:
        for index in range(64):
            before, began = store.calls.total(), time.monotonic()
            group = DynamicGroup.join(store, member(f"w{index}"), None, 10.0)
            costs.append(store.calls.total() - before)
            took.append(time.monotonic() - began)
            stack.callback(group.close)
        assert max(costs) <= 13, costs
        assert costs[5:] == [costs[5]] * 59  # no more at the 64th than at the 6th
        assert sorted(took)[32] < 0.1 * pace()


def test_sixty_four_at_once_are_in_at_once(tcp: Place) -> None:
    stores = [Counting(tcp.open()) for _ in range(64)]
    began = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        groups = list(
            pool.map(
                lambda index: DynamicGroup.join(stores[index], member(f"w{index}"), None, 20.0),
                range(64),
            )
        )
    took = time.monotonic() - began
    with closing(*groups):
        costs = sorted(store.calls.total() for store in stores)
        assert took < 10.0 * pace()
        assert costs[32] <= 40, costs  # while others write, one looks again now and then
        eventually(lambda: len({group.epoch for group in groups}) == 1, 10.0)
        assert len({group.members() for group in groups}) == 1
        assert sorted(group.me.id for group in groups) == list(range(64))


def test_a_newcomer_reads_an_outline_and_not_ten_thousand_entries(tmp_path: Any) -> None:
    store = Counting(dist.HashStore())
    first = DynamicGroup.join(store, member("first"), None, 5.0)
    with closing(first):
        write = first._append  # members that come and go, without a thread each
        for _ in range(1500):
            passing = member("passing", 1)
            write(membership.Join(passing), Deadline(None))
            write(membership.Leave(1, passing.incarnation), Deadline(None))
        store.calls.clear()
        read: list[int] = []
        whole = store._store.multi_get

        class Reads(Counting):
            def multi_get(self, keys: list[str]) -> Any:
                read.append(len(keys))
                return whole(keys)

        counted = Reads(store._store)
        newcomer = DynamicGroup.join(counted, member("new"), None, 5.0)
        with closing(newcomer):
            assert newcomer.epoch == 3002 and names(newcomer) == ["first", "new"]
            assert sum(read) <= 260, read


def test_strangers_write_ahead_in_the_journal_and_move_its_counter(
    tcp: Place, caplog: pytest.LogCaptureFixture
) -> None:
    store = tcp.open()
    with closing(first := DynamicGroup.join(tcp.open(), member("a"), None, 5.0)):
        for number in (2, 3, 4):
            store.set(f"rpc/entry/{number}", b"not a member's")
        for word in ("kind", "outline"):
            store.set(f"rpc/{word}", b"dynamic")
        with closing(second := DynamicGroup.join(tcp.open(), member("b"), None, 10.0)):
            assert names(second) == ["a", "b"]
            eventually(lambda: first.members() == second.members())
            store.add("rpc/next", 1 << 60)
            with pytest.raises(RpcError, match=r"counter .* another program writes to the store"):
                DynamicGroup.join(tcp.open(), member("c"), None, 5.0)
            assert names(first) == names(second) == ["a", "b"]
    told = [each.getMessage() for each in caplog.records if "no member of" in each.getMessage()]
    assert any("'rpc/entry/2'" in each for each in told)


def test_a_stranger_that_writes_over_records_of_a_static_group_costs_nobody_the_group(
    tcp: Place, caplog: pytest.LogCaptureFixture
) -> None:
    store = tcp.open()
    store.set("rpc/kind", b"dynamic")
    store.set("rpc/rank/1", b"no record")
    keys = [f"rpc/rank/{rank}" for rank in range(2)]
    why = "'rpc/rank/0' in the group's store, which no member of this group has signed"
    seen = threading.Event()

    class Waits(Counting):
        """Does not read the records, and so does not restore its own, before the newcomer has seen them."""

        def multi_get(self, asked: list[str]) -> Any:
            assert keys[0] not in asked or seen.wait(20)
            return self._store.multi_get(asked)

    class Sees(Counting):
        """Reads the other's record under the first's key."""

        def multi_get(self, asked: list[str]) -> Any:
            found = self._store.multi_get(asked)
            if keys[0] in asked and not seen.is_set():
                while found[asked.index(keys[0])] != others:
                    store.set(keys[0], others)
                    found = self._store.multi_get(asked)
                seen.set()
            return found

    with ThreadPoolExecutor() as pool:
        begun = [
            pool.submit(StaticGroup.form, opened, member(name, rank), 3, 30.0)
            for rank, (name, opened) in enumerate([("a", Waits(tcp.open())), ("b", tcp.open())])
        ]
        eventually(lambda: tcp.open().check(keys) and store.get(keys[1]) != b"no record")
        others = store.get(keys[1])
        store.set(keys[1], b"no record")
        begun.append(pool.submit(StaticGroup.form, Sees(tcp.open()), member("c", 2), 3, 30.0))
        assert [names(each.result()) for each in begun] == [list("abc")] * 3
    assert why in caplog.text


def test_a_record_that_a_stranger_goes_on_deleting_ends_in_an_error_that_says_so(
    tcp: Place,
) -> None:
    class Deletes(Counting):
        def multi_get(self, keys: list[str]) -> Any:
            return [
                b"no record" if key.endswith("rank/1") else b
                for key, b in zip(keys, self._store.multi_get(keys), strict=True)
            ]

    with pytest.raises(DeadlineExceeded, match=r"rank 1 .*another program writes to the store"):
        store = tcp.open()
        store.set("rpc/rank/1", b"x")
        StaticGroup.form(Deletes(store), member("a", 0), 2, 1.0)


def test_damage_to_the_outline_costs_time_and_nothing_else(tcp: Place) -> None:
    with closing(first := DynamicGroup.join(tcp.open(), member("a"), None, 5.0)):
        for damage in (b"\xff", b'{"v":1,"epoch":1,"next_rank":1,"seats":[[0,1],[1,1]]}'):
            tcp.open().set("rpc/outline", damage)
            name = f"b{len(damage)}"
            with closing(group := DynamicGroup.join(tcp.open(), member(name), None, 5.0)):
                assert group.find("a") == first.me
