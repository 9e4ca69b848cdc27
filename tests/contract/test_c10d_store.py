"""One suite over c10d's interface: torch's own store, and ours beneath it, keep the same promises."""

import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from rallypoint.errors import RendezvousError
from rallypoint.rendezvous.backends.etcd_store import EtcdStore
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.c10d import c10d_store
from servers.etcd_server import EtcdCluster
from tcp_stores import ServedStore


# What every backend has.
METHODS = ("set", "get", "get_many", "add", "put_new", "exists", "delete", "clone", "close")


@pytest.fixture(params=["torch", "memory", "tcpstore", "etcd"])
def store(request: pytest.FixtureRequest) -> Iterator[dist.Store]:
    if request.param == "torch":
        yield dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return
    inner = {
        "memory": MemoryStore,
        "tcpstore": ServedStore,
        "etcd": lambda: request.getfixturevalue("etcd_store").clone(),
    }[request.param]()
    made = c10d_store(inner)
    yield made
    made.close()


@pytest.fixture(params=["bare", "prefixed"])
def view(request: pytest.FixtureRequest, store: dist.Store) -> dist.Store:
    """As Python calls it, and as c10d's C++ does."""
    return store if request.param == "bare" else dist.PrefixStore("below", store)


def test_set_and_get_carry_any_bytes(view: dist.Store) -> None:
    view.set("k", b"\x00\xff")
    view.set("text", "words")
    assert (view.get("k"), view.get("text")) == (b"\x00\xff", b"words")


def test_a_key_that_does_not_come_is_a_store_error_at_the_timeout(view: dist.Store) -> None:
    view.set_timeout(timedelta(milliseconds=100))
    assert view.timeout == timedelta(milliseconds=100) or isinstance(view, dist.PrefixStore)
    for ask in (
        lambda: view.get("never"),
        lambda: view.wait(["never"]),
        lambda: view.wait(["never"], timedelta(milliseconds=50)),
        lambda: view.multi_get(["never"]),
    ):
        with pytest.raises(dist.DistStoreError, match=r"wait timeout.*never"):
            ask()


def test_wait_ends_when_the_last_key_is_there(view: dist.Store) -> None:
    view.set("a", "1")
    other = view.clone()  # a connection that waits may hold up everything else on it
    timer = threading.Timer(0.1, lambda: other.set("b", "2"))
    timer.start()
    view.wait(["a", "b"], timedelta(seconds=10))
    assert view.check(["a", "b"]) and not view.check(["a", "c"])
    timer.join()


def test_add_counts_and_is_read_as_text(view: dist.Store) -> None:
    assert [view.add("n", 5), view.add("n", -7), view.add("n", 0)] == [5, -2, -2]
    assert view.get("n") == b"-2"
    view.set("n", "40")
    assert view.add("n", 2) == 42


def test_compare_set_replaces_only_what_was_expected(view: dist.Store) -> None:
    assert view.compare_set("k", "", "1") == b"1"  # there was no value
    assert view.compare_set("k", "", "2") == b"1"
    assert view.compare_set("k", "1", "2") == b"2"
    assert view.compare_set("k", "1", "3") == b"2"
    assert view.compare_set("none", "1", "2") == b"1"  # c10d's answer, though nothing is set
    assert not view.check(["none"])
    assert view.compare_set("empty", "", "") == b""
    assert view.compare_set("empty", "", "full") == b"full"


def test_compare_set_of_a_counter_compares_its_sum(view: dist.Store) -> None:
    view.add("n", 3)
    assert view.compare_set("n", "2", "9") == b"3"
    assert view.compare_set("n", "3", "9") == b"9"
    assert view.add("n", 1) == 10


def test_compare_set_loses_no_update_among_many_writers(store: dist.Store) -> None:
    """Each appends its name: a lost update is a name that is missing."""
    store.set("names", "-")
    clones = [store.clone() for _ in range(6)]

    def sign(number: int) -> None:
        mine = clones[number]
        for turn in range(5):
            held, done = mine.get("names"), b""
            while done != (wanted := held + f"{number}.{turn},".encode()):
                done = mine.compare_set("names", held, wanted)
                held = held if done == wanted else done

    threads = [threading.Thread(target=sign, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    names = store.get("names").decode().strip("-,").split(",")
    assert sorted(names) == sorted(f"{number}.{turn}" for number in range(6) for turn in range(5))


def test_delete_and_count_keys(view: dist.Store) -> None:
    try:
        before = view.num_keys()
    except RendezvousError as error:
        pytest.skip(str(error))
    view.set("k", "1")
    view.add("n", 1)
    assert view.num_keys() == before + 2
    assert view.delete_key("k") and not view.delete_key("k")
    assert view.delete_key("n")
    assert view.num_keys() == before


def test_append_and_many_at_once(view: dist.Store) -> None:
    if not view.has_extended_api():
        pytest.skip("the store says so")
    view.append("k", "one ")
    view.append("k", b"two")
    view.multi_set(["a", "b"], ["1", "2"])
    assert view.multi_get(["k", "a", "b"]) == [b"one two", b"1", b"2"]


def test_a_clone_is_the_same_store_with_a_timeout_of_its_own(view: dist.Store) -> None:
    clone = view.clone()
    clone.set_timeout(timedelta(milliseconds=50))
    clone.set("k", "1")
    assert view.get("k") == b"1"


def test_a_store_that_only_c10d_holds_stays_usable() -> None:
    """c10d keeps no reference to the Python half of a store; without that half its calls find nothing."""
    prefixed = dist.PrefixStore("x", c10d_store(MemoryStore()))
    clone = prefixed.clone()
    gc.collect()
    prefixed.set("k", "1")
    clone.set("l", "2")
    assert prefixed.get("k") == b"1"


def test_what_a_store_cannot_do_is_said() -> None:
    class Plain:
        """A store without compare_set and num_keys."""

        def __init__(self) -> None:
            whole = MemoryStore()
            for name in METHODS:
                setattr(self, name, getattr(whole, name))

    store = c10d_store(Plain())
    assert store.compare_set("k", "", "1") == b"1"
    with pytest.raises(RendezvousError, match=r"Plain .* not replace a value on condition"):
        store.compare_set("k", "1", "2")
    with pytest.raises(RendezvousError, match="Plain cannot count"):
        store.num_keys()
    assert not store.has_extended_api()
    store.close()


def test_a_lost_store_is_a_network_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = c10d_store(EtcdStore(endpoints=[f"127.0.0.1:{port}"], prefix="x", patience=0.2))
    with pytest.raises(dist.DistNetworkError, match="connection refused"):
        dist.PrefixStore("y", store).set("k", "1")
    store.close()


# Collections while torch is imported, and taking it apart at exit, are a third of a short worker's time.
WORKER = """
import gc, os, sys
from datetime import timedelta
gc.disable()
import torch, torch.distributed as dist
from rallypoint.rendezvous.backends.etcd_store import EtcdStore
from rallypoint.rendezvous.c10d import c10d_store
endpoint, prefix, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = EtcdStore(endpoints=[endpoint], prefix=prefix)
dist.init_process_group("gloo", store=dist.PrefixStore("x", c10d_store(store)), rank=rank,
                        world_size=2, timeout=timedelta(seconds=60))
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
group = dist.new_group([0, 1])
gathered = [None, None]
dist.all_gather_object(gathered, f"r{rank}", group=group)
dist.barrier()
print(x.item(), gathered, flush=True)
dist.destroy_process_group()
os._exit(0)
"""


def test_a_process_group_meets_over_etcd(etcd_store: EtcdStore, etcd_cluster: EtcdCluster) -> None:
    prefix = f"gloo/{os.getpid()}"
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, etcd_cluster.endpoints[0], prefix, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=80)
            assert worker.returncode == 0, err
            assert out.strip() == "3.0 ['r0', 'r1']"
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
