"""What others do to a worker: die, stop, know no secret, send what they must not."""

import functools
import os
import pickle
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch

import rpc_workers
from pace import pace
from ports import free_port
from rallypoint import rpc
from rallypoint.errors import PeerLost, RpcError
from rpc_workers import Workers, eventually, timed


pytestmark = [pytest.mark.integration, pytest.mark.alone]

# Seconds in which a death on the same host must be noticed.
NOTICED = 0.1
happened: list[Any] = []


def seen() -> list[Any]:
    return list(happened)


def double(x: Any) -> Any:
    return 2 * x


def nap(seconds: float, *_: Any) -> float:
    time.sleep(seconds)
    return seconds


def ask(to: str, func: Any, args: Any = ()) -> Any:
    return rpc.rpc_sync(to, func, args)


def count() -> Any:
    yield from range(10**9)


async def doze() -> None:
    import asyncio

    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        happened.append("cancelled")
        raise


async def note_and_doze() -> None:
    happened.append("dozes")
    await doze()


may_end = threading.Event()


def note_long(what: Any) -> None:
    happened.append(what)
    may_end.wait(60)


def let_end() -> None:
    may_end.set()


# -- death --------------------------------------------------------------------------------------


def wait_for_death(way: str) -> float:
    """When it was noticed, on the clock that all processes of a host share."""
    calls = {
        "sync": lambda: rpc.rpc_sync("w1", nap, (30,)),
        "async": lambda: rpc.rpc_async("w1", nap, (30,)).wait(),
        "callback": lambda: torch.futures.collect_all([rpc.rpc_async("w1", nap, (30,))]).wait(),
        "remote": lambda: rpc.remote("w1", nap, (30,)).to_here(),
        "sending": lambda: [
            rpc.rpc_sync("w1", double, (torch.ones(2_000_000),)) for _ in range(999)
        ],
        "pipelined": lambda: [rpc.rpc_async("w1", double, (i,)) for i in range(10_000)][-1].wait(),
    }
    try:
        calls[way]()
    except PeerLost as error:
        noticed = time.monotonic()
        assert error.worker == "w1"
        assert isinstance(error, (RuntimeError, ConnectionError))
        return noticed
    raise AssertionError("it has ended well")


@pytest.mark.parametrize("way", ["sync", "async", "remote"])
@pytest.mark.parametrize("transport", ["uds", "tcp"])
def test_who_waits_for_one_that_is_killed_knows_within_a_tenth_of_a_second(way, transport):
    took = []
    for _ in range(3):  # the machine may be busy: once is enough
        with Workers(2) as workers:
            workers.run(functools.partial(rpc_workers.join, transports=[transport]))
            workers.on(0, lambda: rpc.rpc_sync("w1", double, (1,)))
            waiting = workers.begin(0, wait_for_death, way)
            time.sleep(0.05)
            killed = time.monotonic()
            workers.kill(1)
            took.append(waiting.result() - killed)
        if took[-1] <= NOTICED * pace():
            break
    assert min(took) <= NOTICED * pace()


@pytest.mark.parametrize("way", ["sending", "pipelined"])
def test_who_sends_to_one_that_is_killed_is_not_held_up(way):
    with Workers(2) as workers:
        workers.run(rpc_workers.join)
        waiting = workers.begin(0, wait_for_death, way)
        time.sleep(0.1)
        killed = time.monotonic()
        workers.kill(1)
        assert waiting.result() - killed < 2 * pace()


def test_calls_to_the_dead_fail_at_once_and_others_go_on():
    with Workers(3) as workers:
        workers.run(rpc_workers.join)
        workers.on(0, lambda: [rpc.rpc_sync(f"w{i}", double, (1,)) for i in (1, 2)])
        workers.kill(1)

        def case():
            for call in (rpc.rpc_sync, lambda *a: rpc.rpc_async(*a).wait()):
                with timed(0.5), pytest.raises(PeerLost):
                    call("w1", double, (1,))
            with pytest.raises(PeerLost):
                rpc.remote("w1", double, (1,)).to_here()
            with pytest.raises(PeerLost):
                list(rpc.rpc_stream("w1", count))
            return rpc.rpc_sync("w2", double, (4,))

        assert workers.on(0, case) == 8
        # w2 had no connection to w1 at all.
        workers.on(2, case_of_stranger)


def case_of_stranger() -> None:
    with timed(2), pytest.raises(PeerLost, match="w1"):
        rpc.rpc_sync("w1", double, (1,))
    with timed(0.2), pytest.raises(PeerLost, match="w1"):
        rpc.rpc_sync("w1", double, (1,))


def test_the_loss_of_a_third_worker_reaches_the_first_caller_by_name():
    with Workers(3) as workers:
        workers.run(rpc_workers.join)

        def case():
            with timed(2), pytest.raises(PeerLost) as caught:
                rpc.rpc_sync("w1", ask, ("w2", nap, (30,)))
            assert caught.value.worker == "w2"
            assert rpc.rpc_sync("w1", double, (1,)) == 2

        waiting = workers.begin(0, case)
        time.sleep(0.1)
        workers.kill(2)
        waiting.result()


def test_what_the_dead_have_asked_for_is_given_up():
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=1))

        def begin():
            rpc_workers.held["calls"] = [
                rpc.rpc_async("w1", note_and_doze),
                *(rpc.rpc_async("w1", note_long, (i,)) for i in range(5)),
            ]

        def has_all_calls():
            incoming = rpc.api._get_current_rpc_agent().connections.all_incoming()
            active = [len(each.active) for each in incoming]
            return active == [6] and sorted(map(str, seen())) == ["0", "dozes"]

        workers.on(0, begin)
        workers.on(1, lambda: eventually(has_all_calls))
        workers.kill(0)

        def has_given_up():
            connections = rpc.api._get_current_rpc_agent().connections
            return "cancelled" in seen() and not connections.all_incoming()

        workers.on(1, lambda: eventually(has_given_up))
        workers.on(1, let_end)
        time.sleep(0.3)  # what was still in the queue would be done by now
        assert sorted(map(str, workers.on(1, seen))) == ["0", "cancelled", "dozes"]


def test_a_death_leaves_no_shared_memory_and_no_descriptors():
    with Workers(2) as workers:
        before = workers.on(0, rpc_workers.resources)
        shm = set(os.listdir("/dev/shm"))
        workers.run(rpc_workers.join)

        def use():
            for _ in range(5):
                rpc.rpc_sync("w1", double, (torch.ones(1_000_000),))

        workers.on(0, use)
        workers.kill(1)

        def leave():
            rpc.shutdown(graceful=False)
            return rpc_workers.resources()

        assert workers.on(0, leave) == before
        assert set(os.listdir("/dev/shm")) <= shm


def test_one_that_is_stopped_is_late_and_not_lost():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)
        workers.on(0, lambda: rpc.rpc_sync("w1", double, (1,)))
        workers.signal(1, signal.SIGSTOP)

        def late():
            with timed(1, 0.1), pytest.raises(rpc.RpcTimeout):
                rpc.rpc_sync("w1", double, (1,), timeout=0.2)
            with timed(1, 0.1), pytest.raises(rpc.RpcTimeout):
                rpc.rpc_async("w1", double, (1,), timeout=0.2).wait()

        workers.on(0, late)
        workers.signal(1, signal.SIGCONT)
        assert workers.on(0, lambda: rpc.rpc_sync("w1", double, (1,))) == 2


def test_one_that_is_stopped_before_the_first_call_is_late_and_not_lost():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)
        workers.signal(1, signal.SIGSTOP)

        def late():
            with timed(3, 0.1), pytest.raises((rpc.RpcTimeout, PeerLost)):
                rpc.rpc_sync("w1", double, (1,), timeout=0.3)

        workers.on(0, late)
        workers.signal(1, signal.SIGCONT)
        assert workers.on(0, lambda: rpc.rpc_sync("w1", double, (1,))) == 2


def test_a_connection_that_breaks_is_not_a_death():
    """Both live on: calls under way fail, the next one connects again."""
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def case():
            rpc.rpc_sync("w1", double, (1,))
            future = rpc.rpc_async("w1", nap, (0.5,))
            (outgoing,) = rpc.api._get_current_rpc_agent().connections.outgoing.values()
            outgoing.line._sock.shutdown(socket.SHUT_RDWR)
            with timed(1), pytest.raises(PeerLost):
                future.wait()
            return eventually(lambda: _again(), 3)

        assert workers.on(0, case) == 6


def _again() -> Any:
    try:
        return rpc.rpc_sync("w1", double, (3,))
    except PeerLost:
        return None


# -- who is let in ------------------------------------------------------------------------------


def test_one_with_another_secret_is_refused_and_the_group_goes_on():
    with Workers(3) as workers:

        def come(secret: str) -> str:
            try:
                rpc_workers.join_dynamic(secret=secret)
            except RpcError as error:
                return str(error)
            return ""

        for rank in (0, 1):
            assert workers.on(rank, come, "the secret of the job") == ""
        said = workers.on(2, come, "another secret of the job")
        assert "the members of the group do not share a secret" in said
        assert "RALLY_SECRET" in said
        assert workers.on(0, lambda: rpc.rpc_sync("w1", double, (1,))) == 2


def addresses() -> dict[str, Any]:
    return dict(rpc.api._get_current_rpc_agent().group.me.addresses)


class Bomb:
    def __reduce__(self) -> Any:
        return (happened.append, ("it went off",))


@pytest.mark.parametrize("transport", ["uds", "tcp"])
def test_strangers_are_refused_before_anything_they_send_is_looked_at(transport):
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, transports=["uds", "tcp"]))
        where = workers.on(1, addresses)[transport]
        bomb = pickle.dumps(Bomb())
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bomb, b"\0" * 100_000, os.urandom(5_000)):
            with _connect(transport, where) as stranger:
                stranger.settimeout(5)
                try:
                    stranger.sendall(data)
                    if data:
                        while stranger.recv(4096):  # until it is turned away
                            pass
                except ConnectionError:
                    pass
        assert workers.on(1, seen) == []
        assert workers.on(0, lambda: rpc.rpc_sync("w1", double, (1,))) == 2
        eventually(lambda: not workers.on(1, strangers))
        workers.run(rpc_workers.leave)


def strangers() -> int:
    return len(rpc.api._get_current_rpc_agent().acceptor.strangers)


def _connect(transport: str, where: Any) -> socket.socket:
    from rallypoint._core.clock import Deadline
    from rallypoint.wire import tcp, uds

    if transport == "uds":
        return uds.connect(where, Deadline(5))
    return tcp.connect(where, Deadline(5), 5.0)


def test_a_worker_of_another_job_is_not_taken_for_ours():
    """The same secret, and the very port that the lost worker had."""
    with Workers(2) as first, Workers(2) as second:
        port = free_port()

        def come(number):
            rpc_workers.join(
                transports=["tcp"],
                secret="what both jobs know",
                port=number if rpc_workers.rank == 1 else 0,
            )

        first.run(come, port)
        assert first.on(0, lambda: rpc.rpc_sync("w1", double, (1,))) == 2
        first.kill(1)
        second.run(come, port)
        assert second.on(0, lambda: rpc.rpc_sync("w1", double, (1,))) == 2

        def refused():
            with timed(3), pytest.raises(PeerLost):
                rpc.rpc_sync("w1", double, (1,))

        first.on(0, refused)


# -- what may be called -------------------------------------------------------------------------


def join_with_list() -> None:
    """All accept only calls of this module, of torch, and of a few builtins."""
    rpc_workers.join(allowed_modules=[double.__module__, "torch", "collections", "builtins.slice"])


class Sneaky:
    """Names what must not be named, in a way that looks allowed."""

    def __init__(self, *names: Any) -> None:
        self.names = names

    def __reduce__(self) -> Any:
        return _Name(*self.names), ()


class _Name:
    pass


def test_only_what_is_on_the_list_can_be_called():
    with Workers(2) as workers:
        workers.run(join_with_list)

        def case():
            assert rpc.rpc_sync("w1", double, (2,)) == 4
            assert torch.equal(
                rpc.rpc_sync("w1", double, (torch.ones(3, 4).t(),)), 2 * torch.ones(4, 3)
            )
            assert rpc.rpc_sync("w1", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
            rref = rpc.remote("w1", double, (torch.ones(2),))
            assert rref.to_here().tolist() == [2, 2]
            assert rref.rpc_sync().sum().item() == 4
            assert rpc.rpc_sync("w1", fetch, (rref,)) == 4
            with pytest.raises(ValueError, match="bad"):
                rpc.rpc_sync("w1", raise_value_error)
            for func, args in (
                (os.getpid, ()),
                (time.sleep, (0,)),
                (eval, ("1",)),
                (threading.Lock, ()),
            ):
                for call in (rpc.rpc_sync, lambda *a: rpc.rpc_async(*a).wait()):
                    with pytest.raises(Exception, match="worker 'w1' does not allow"):
                        call("w1", func, args)
                with pytest.raises(Exception, match="worker 'w1' does not allow"):
                    rpc.remote("w1", func, args).to_here(timeout=3)
            assert rpc.rpc_sync("w1", double, (2,)) == 4

        workers.on(0, case)
        workers.run(lambda: rpc.api._all_gather(rpc_workers.rank, timeout=5))
        workers.run(rpc_workers.leave)


def fetch(rref: Any) -> float:
    return rref.to_here().sum().item()


def raise_value_error() -> None:
    raise ValueError("bad")
