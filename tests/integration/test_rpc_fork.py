"""A child that is forked from a worker is no worker: it can harm nobody, but it can become one."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import rpc_workers
from rallypoint import rpc
from rallypoint._core import forks
from rallypoint.errors import PeerLost, RendezvousConnectionError, RpcError
from rallypoint.rendezvous.backends.tcpstore import TcpStore
from rallypoint.rendezvous.liveness import WatchPost
from rpc_workers import Workers, eventually
from tcp_stores import ServedStore


pytestmark = pytest.mark.integration

# Seconds that a child may take.
LIMIT = 60.0
LARGE = 4 << 20

kept: list[Any] = []


@pytest.fixture(scope="module")
def duo() -> Iterator[Workers]:
    with Workers(2) as workers:
        workers.run(rpc_workers.join_dynamic)
        yield workers
        workers.run(rpc.shutdown)


def told_by_child(act: Callable[[], Any]) -> Any:
    """What ``act`` returns, or raises, in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            told = act()
        except BaseException as error:
            told = type(error), str(error)
        try:
            os.write(writing, pickle.dumps(told))
        finally:
            os._exit(0)
    os.close(writing)
    try:
        assert select.select([reading], [], [], LIMIT)[0], "the child hangs"
        return pickle.loads(os.read(reading, 1 << 16))
    finally:
        os.close(reading)
        os.kill(child, 9)
        os.waitpid(child, 0)


def add(x: Any, y: Any) -> Any:
    return x + y


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


# -- every call of the child's ----------------------------------------------------------------------


def refused(act: Callable[[], Any]) -> str | None:
    """None if it raises what it should."""
    try:
        value = act()
    except RpcError as error:
        return None if "forked" in str(error) else str(error)
    except BaseException as error:
        return repr(error)
    return f"returned {value!r}"


def uses_of_all_there_is() -> dict[str, str]:
    """Try everything in a child. Returns what did not go as it should."""
    pending = rpc.rpc_async("w1", nap, (0.5,))
    done = rpc.rpc_async("w1", add, (1, 1))
    assert done.wait() == 2
    following = pending.then(lambda each: each.value() + 1)
    stream = rpc.rpc_stream("w1", numbers, (1000,))
    assert next(stream) == 0
    rref = rpc.remote("w1", add, args=(1, 2))
    own = rpc.RRef(5)
    assert rref.to_here() == 3
    uses: dict[str, Callable[[], Any]] = {
        "rpc_sync": lambda: rpc.rpc_sync("w1", add, (1, 2)),
        "rpc_async": lambda: rpc.rpc_async("w1", add, (1, 2)),
        "remote": lambda: rpc.remote("w1", add, (1, 2)),
        "rpc_stream": lambda: rpc.rpc_stream("w1", numbers, (2,)),
        "to itself": lambda: rpc.rpc_sync("w0", add, (1, 2)),
        "RRef": lambda: rpc.RRef(1),
        "get_worker_info": rpc.get_worker_info,
        "get_rpc_timeout": rpc.get_rpc_timeout,
        "members": rpc.members,
        "wait_for": lambda: rpc.wait_for("w1"),
        "on_join": lambda: rpc.on_join(print),
        "on_leave": lambda: rpc.on_leave(print),
        "statistics": rpc.statistics,
        "shutdown": rpc.shutdown,
        "shutdown at once": lambda: rpc.shutdown(graceful=False),
        "_all_gather": lambda: rpc.api._all_gather(1),
        "wait": pending.wait,
        "value": pending.value,
        "then": lambda: pending.then(print),
        "add_done_callback": lambda: pending.add_done_callback(print),
        "cancel": pending.cancel,
        "wait of then": following.wait,
        "wait_all": lambda: rpc.api.wait_all([pending, done]),
        "next": lambda: next(stream),
        "to_here": rref.to_here,
        "to_here of its own": own.to_here,
        "local_value": own.local_value,
        "owner": rref.owner,
        "owner_name": rref.owner_name,
        "is_owner": own.is_owner,
        "confirmed_by_owner": rref.confirmed_by_owner,
        "rref.rpc_sync": lambda: rref.rpc_sync().bit_length(),
        "rref.rpc_async": lambda: rref.rpc_async().bit_length(),
        "rref.remote": lambda: rref.remote().bit_length(),
        "backward": rref.backward,
    }

    def try_all() -> dict[str, str]:
        told = {name: why for name, act in uses.items() if (why := refused(act)) is not None}
        if done.wait() != 2 or not pending.done() or rpc.current_call() is not None:
            told["what was there already"] = f"{done.wait()}, {pending.done()}"
        stream.close()
        return told

    told: dict[str, str] = told_by_child(try_all)
    # And here nothing has happened.
    assert pending.wait() == 0.5
    assert following.wait() == 1.5
    assert list(stream) == list(range(1, 1000))
    assert rref.to_here() + own.to_here() == 8
    return told


def test_every_call_in_a_child_is_refused_and_the_parent_goes_on(duo):
    assert duo.on(0, uses_of_all_there_is, limit=LIMIT) == {}


# -- what the child has of its parent ---------------------------------------------------------------


def held(*kinds: str) -> int:
    """How many descriptors of these kinds this process has."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(kinds)
    return found


def sockets_of_children() -> tuple[int, int, int, int]:
    """Number of sockets here, and of those that are an agent's; number of sockets in a child, and of its epolls and eventfds."""
    rpc.rpc_sync("w1", add, (1, 2))
    rpc.rpc_sync("w0", add, (1, 2))
    here = held("socket:")
    known = {each.fileno() for each in list(forks._closeables)} - {-1}
    ours = sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in known)
    there, shared = told_by_child(
        lambda: (held("socket:"), held("anon_inode:[eventpoll]", "anon_inode:[eventfd]"))
    )
    return here, ours, there, shared


def test_a_child_holds_no_connection_of_its_parent(duo):
    here, ours, there, shared = duo.on(0, sockets_of_children, limit=LIMIT)
    assert ours >= 6
    assert there <= here - ours
    assert shared == 0


def forked_and_asleep() -> int:
    child = os.fork()
    if not child:
        time.sleep(LIMIT)
        os._exit(0)
    return child


def call_what_dies() -> float:
    """Seconds until the death is noticed."""
    future = rpc.rpc_async("w1", nap, (LIMIT,))
    assert rpc.rpc_sync("w1", add, (2, 2)) == 4
    held_by_child = rpc.rpc_sync("w1", forked_and_asleep)
    pid = rpc.rpc_sync("w1", os.getpid)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    try:
        with pytest.raises(PeerLost):
            future.wait()
        took = time.monotonic() - began
        os.kill(held_by_child, 0)
    finally:
        os.kill(held_by_child, signal.SIGKILL)
    return took


@pytest.mark.parametrize("transport", ["uds", "tcp"])
def test_a_worker_that_dies_is_missed_although_its_child_lives(transport):
    with Workers(2) as workers:
        workers.run(lambda: rpc_workers.join_dynamic(transports=(transport,)))
        assert workers.on(0, call_what_dies, limit=LIMIT) < LIMIT / 2
        workers.on(0, rpc.shutdown)


def large(fill: int) -> torch.Tensor:
    return torch.full((LARGE,), fill, dtype=torch.uint8)


def children_that_drop_all(rounds: int) -> int:
    """Call from several threads, and meanwhile fork children that drop whatever they have. Returns how many answers are wrong."""
    wrong: list[Any] = []
    ends = threading.Event()

    def call(number: int) -> None:
        rref = rpc.remote("w1", large, (number,))
        while not ends.is_set():
            got = rpc.rpc_sync("w1", add, (large(number), 1))
            if int(got.min()) != number + 1 or int(got.max()) != number + 1:
                wrong.append((number, got))
            if rpc.rpc_async("w1", add, (number, 7)).wait() != number + 7:
                wrong.append(number)
            if not torch.equal(rref.to_here(), large(number)):
                wrong.append(rref)

    held = rpc.rpc_sync("w1", large, (77,))
    # Each of torch's functions that threads or children use is used once before. Its first use sets something up under a
    # lock of the C library or of torch, and a child that is forked at that moment never gets that lock.
    torch.equal(held + 1, large(78))
    bool(held.eq(77).all()), int(held.min()), int(held.max())
    kept.append(rpc.remote("w1", large, (78,)))
    kept.append(rpc.rpc_stream("w1", numbers, (1000,), timeout=0))
    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()

    def drop() -> bool:
        nonlocal held
        as_it_was = bool(held.eq(77).all())
        del held
        kept.clear()
        gc.collect()
        return as_it_was and refused(lambda: rpc.rpc_sync("w1", add, (1, 1))) is None

    try:
        wrong += [told for _ in range(rounds) if (told := told_by_child(drop)) is not True]
    finally:
        ends.set()
        for each in threads:
            each.join()
    if not bool(held.eq(77).all()) or list(kept.pop()) != list(range(1000)):
        wrong.append("held")
    if not torch.equal(kept.pop().to_here(), large(78)):
        wrong.append("kept")
    return len(wrong)


def test_children_that_drop_everything_amid_calls_of_many_threads(duo):
    assert duo.on(0, children_that_drop_all, 10, limit=2 * LIMIT) == 0
    assert duo.on(1, lambda: rpc.rpc_sync("w0", add, (3, 4))) == 7


# -- a child that becomes a worker ------------------------------------------------------------------


def child_joins(name: str) -> Any:
    """A child joins, calls its parent, and leaves; meanwhile others call it."""
    reading, writing = os.pipe()
    store = rpc_workers.store()
    child = os.fork()
    if not child:
        try:
            rpc.init_rpc(name, store=store)
            told = [rpc.rpc_sync(each, add, (20, 1)) for each in ("w0", "w1", name)]
            big = rpc.rpc_sync("w0", add, (large(1), large(2)))
            os.write(writing, pickle.dumps((told, int(big.sum()))))
            kept.append(threading.Event())
            kept[-1].wait(LIMIT)
            rpc.shutdown()
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert select.select([pipe], [], [], LIMIT)[0], "the child hangs"
        told = pickle.loads(os.read(pipe.fileno(), 4096))
    back = rpc.rpc_sync(name, add, (30, 1)), rpc.rpc_sync("w1", rpc.rpc_sync, (name, add, (40, 1)))
    rpc.rpc_sync(name, let_go)
    _, status = os.waitpid(child, 0)
    return told, back, status, rpc.rpc_sync("w1", add, (50, 1))


def let_go() -> None:
    kept[-1].set()


def test_a_child_joins_under_another_name(duo):
    told, back, status, after = duo.on(0, child_joins, "grandchild", limit=2 * LIMIT)
    assert told == ([21, 21, 21], 3 * LARGE)
    assert back == (31, 41)
    assert (status, after) == (0, 51)


# -- where else children come from ------------------------------------------------------------------


class Squares(Dataset[Any]):
    """Calls from wherever it is asked to."""

    def __init__(self, calls: bool) -> None:
        self.offset = rpc.rpc_sync("w1", large, (3,))
        self.rref = rpc.RRef(1)
        self.calls = calls

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if self.calls:
            return rpc.rpc_sync("w1", add, (index, 1))
        return index * index + int(self.offset[index])


def loads(calls: bool) -> Any:
    loader = DataLoader(Squares(calls), num_workers=2, batch_size=4)
    return [each.tolist() for each in loader], rpc.rpc_sync("w1", add, (1, 2))


def test_a_data_loader_in_a_worker(duo):
    batches, after = duo.on(0, loads, False, limit=2 * LIMIT)
    assert batches == [[3, 4, 7, 12], [19, 28, 39, 52]]
    assert after == 3
    with pytest.raises(rpc_workers.CaseFailed, match="was forked from worker 'w0'"):
        duo.on(0, loads, True, limit=2 * LIMIT)
    assert duo.on(0, rpc.rpc_sync, "w1", add, (1, 2)) == 3


def in_process(name: str, results: Any) -> None:
    results.put(refused(lambda: rpc.rpc_sync("w1", add, (1, 1))))


def forked_process() -> Any:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=in_process, args=("w0", results))
    process.start()
    told = results.get()
    process.join(LIMIT)
    return told, process.exitcode


def fork_and_return() -> int:
    """Runs as a served call; its child returns from it into threads that do not exist there."""
    child = os.fork()
    if not child:
        assert rpc.current_call() is None
        assert refused(lambda: rpc.rpc_sync("w1", add, (1, 1))) is None
        return -1
    _, status = os.waitpid(child, 0)
    return status


@pytest.mark.parametrize("place", [forked_process, fork_and_return])
def test_a_function_that_is_served_forks(duo, place):
    told = duo.on(1, rpc.rpc_sync, "w0", place, limit=LIMIT)
    assert told == ((None, 0) if place is forked_process else 0)
    remote = duo.on(1, lambda: rpc.remote("w0", place).to_here(), limit=LIMIT)
    assert remote == told
    assert duo.on(1, rpc.rpc_sync, "w0", add, (1, 2)) == 3


# -- the hooks --------------------------------------------------------------------------------------


def test_what_belongs_to_the_parent_is_abandoned_in_the_child_alone():
    class Thing:
        process = None

        def abandon(self) -> None:
            self.process = os.getpid()

    thing = Thing()
    ours, theirs = socket.socketpair()
    forks.abandon_in_child(thing)
    forks.close_in_child(ours)
    here = forks.process
    told = told_by_child(
        lambda: (thing.process == os.getpid(), ours.fileno(), forks.process is here)
    )
    assert told == (True, -1, False)
    assert (thing.process, forks.process) == (None, here)
    ours.send(b"x")
    assert theirs.recv(1) == b"x"
    ours.close()
    theirs.close()


def test_a_fork_waits_until_a_descriptor_is_known():
    is_open, go_on = threading.Event(), threading.Event()
    pair: list[socket.socket] = []

    def open_slowly() -> None:
        with forks.opening():
            pair.extend(socket.socketpair())
            is_open.set()
            go_on.wait(LIMIT)
            forks.close_in_child(pair[0])

    opener = threading.Thread(target=open_slowly)
    opener.start()
    is_open.wait(LIMIT)
    threading.Timer(0.1, go_on.set).start()
    assert told_by_child(lambda: pair[0].fileno()) == -1
    opener.join()
    for each in pair:
        each.close()


def test_a_lock_that_another_thread_holds_is_free_in_children():
    lock = forks.Lock()
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            go_on.wait(LIMIT)

    def take() -> bool:
        with lock:
            return True

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(LIMIT)
    assert told_by_child(take)
    assert told_by_child(lambda: take() and told_by_child(take))
    go_on.set()
    holder.join()
    with lock:
        # A child forked by the very thread that holds it also leaves the block.
        assert told_by_child(lambda: lock.__exit__() or take())


# -- the rest of the package ------------------------------------------------------------------------


def _is_accepted(sock: Any, port: int) -> bool:
    if not isinstance(sock, socket.socket):
        return False
    try:
        return bool(sock.getsockname()[1] == port and sock.getpeername())
    except OSError:
        return False


def _is_refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_child_does_not_keep_its_parent_alive_for_those_who_watch_it():
    post = WatchPost()
    with socket.create_connection(("127.0.0.1", post.port)) as watcher:
        eventually(lambda: any(_is_accepted(each, post.port) for each in list(forks._closeables)))
        child = forked_and_asleep()
        post_address = watcher.getpeername()[:2]
        try:
            post.close()
            watcher.settimeout(LIMIT)
            assert watcher.recv(1) == b""
            eventually(
                lambda: _is_refused(post_address)
            )  # the child closes one copy after the other
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_child_that_closes_its_parents_store_does_not_end_it():
    server = ServedStore()
    client = TcpStore("127.0.0.1", server.port, silence=LIMIT)

    def use_and_close() -> str:
        with pytest.raises(RendezvousConnectionError) as caught:
            client.set("key", b"child")
        client.close()
        server.close()
        return str(caught.value)

    assert "is closed" in told_by_child(use_and_close)
    client.set("key", b"parent")
    assert client.get("key", LIMIT) == b"parent"
    client.close()
    server.close()
