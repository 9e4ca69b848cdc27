"""What goes wrong between two workers, and what the others must not notice of it."""

import asyncio
import contextlib
import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pace import pace
from rallypoint._core.clock import Deadline
from rallypoint.errors import PeerLost, RpcError, RpcTimeout
from rallypoint.rpc import NativeRpcBackendOptions, RRef
from rallypoint.rpc.agent.agent import Agent
from rallypoint.rpc.agent.coroutine_loop import CoroutineLoop
from rallypoint.rpc.agent.item_source import ItemSource
from rallypoint.rpc.agent.serving import Request
from rallypoint.rpc.backends import _init
from rallypoint.rpc.connections.messages import Kind
from rallypoint.rpc.current_call import CurrentCall
from rallypoint.rpc.references.rref import _take_back, call_remote
from rallypoint.rpc.serialization import payload
from rallypoint.rpc.serialization.tensor_writer import TensorWriter
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.wire.frames import Frame


pytestmark = pytest.mark.integration


def add(a: int, b: int) -> int:
    return a + b


def give(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


def give_at_gate(size: int) -> torch.Tensor:
    GATE.wait(10.0)
    return torch.zeros(size, dtype=torch.uint8)


def nap(seconds: float) -> bool:
    time.sleep(seconds)
    return True


GATE = threading.Event()


def wait_at_gate() -> bool:
    return GATE.wait(10.0)


def count(items: int) -> Iterator[int]:
    yield from range(items)


class Place:
    """Agents in one process that meet in one store."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.agents: list[Agent] = []

    def join(self, name: str, *transports: str) -> Agent:
        options = NativeRpcBackendOptions(
            transports=transports or ("uds",), bind="127.0.0.1", rpc_timeout=10.0
        )
        agent = _init(Agent, NativeRpcBackendOptions, self.store, name, -1, None, options)
        self.agents.append(agent)
        agent.start()
        return agent


@pytest.fixture
def place() -> Iterator[Place]:
    before = set(threading.enumerate())
    made = Place()
    yield made
    for agent in made.agents:
        with contextlib.suppress(Exception):
            agent.group.leave()
        agent.close()
    eventually(lambda: set(threading.enumerate()) <= before)


def eventually(is_so: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = Deadline(seconds)
    while not is_so():
        assert not deadline.expired()
        time.sleep(0.01)


def call(agent: Agent, to: str, func: Any, *args: Any, timeout: float = -1.0) -> Any:
    return agent.call_sync(to, Kind.CALL, func, (func, args, None), timeout)


def call_async(agent: Agent, to: str, func: Any, *args: Any, timeout: float = -1.0) -> Any:
    return agent.call_async(to, Kind.CALL, func, (func, args, None), timeout)


def dies(agent: Agent) -> None:
    """Die as if the process had been killed: it says nothing to anybody."""
    agent.group.leave = lambda *_: None  # type: ignore[method-assign]
    agent.close()


def never_answers(place: Place, name: str, *transports: str) -> Agent:
    """A member whose process does nothing, as if it were stopped."""
    agent = place.join(name, *transports)
    for listener in agent.acceptor.listeners:
        agent._poller.remove(listener.fileno())
    return agent


@pytest.mark.parametrize("transport", ["uds", "tcp"])
def test_connecting_takes_no_longer_than_the_call_may(place: Place, transport: str) -> None:
    a = place.join("a", transport)
    never_answers(place, "b", transport)
    began = time.monotonic()
    with pytest.raises(RpcTimeout, match="connection to 'b'"):
        call(a, "b", add, 1, 2, timeout=0.3)
    with pytest.raises(RpcTimeout, match="connection to 'b'"):
        call_async(a, "b", add, 1, 2, timeout=0.3).wait()
    rref = call_remote(a, "b", add, (1, 2), None, 0.3)
    with pytest.raises(RpcTimeout, match="connection to 'b'"):
        rref._get_future().wait()
    assert time.monotonic() - began < 2.5 * pace()


def test_calls_that_wait_for_the_same_connection_end_in_time_too(place: Place) -> None:
    a = place.join("a")
    never_answers(place, "b")
    ended: list[float] = []

    def one(seconds: float) -> None:
        with pytest.raises(RpcTimeout):
            call(a, "b", add, 1, 2, timeout=seconds)
        ended.append(time.monotonic())

    began = time.monotonic()
    threads = [threading.Thread(target=one, args=(seconds,)) for seconds in (2.0, 0.2, 0.2)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert max(sorted(ended)[:2]) - began < pace()


@pytest.mark.parametrize("transport", ["uds", "tcp"])
@pytest.mark.parametrize("sync", [True, False])
def test_a_peer_that_does_not_read_costs_no_more_than_the_time_out(
    place: Place, transport: str, sync: bool
) -> None:
    a, b = place.join("a", transport), place.join("b", transport)
    assert call(a, "b", add, 1, 2) == 3
    for incoming in b.connections.incoming:
        b._poller.remove(incoming.line.fileno())
    tensor = torch.zeros(40 << 20, dtype=torch.uint8)
    outgoing = a.route("b")
    if outgoing.sharing is not None:
        outgoing.sharing.place = lambda buffers, **_: (buffers, [])  # as when the memory is spent
    began = time.monotonic()
    with pytest.raises(RpcTimeout):
        if sync:
            call(a, "b", len, tensor, timeout=0.3)
        else:
            call_async(a, "b", len, tensor, timeout=0.3).wait()
    assert time.monotonic() - began < 1.3 * pace()
    assert not outgoing.calls


class Slow:
    """Takes a moment to pickle, and is large enough to be a piece of its own."""

    pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(0.05)
        Slow.pickled += 1
        return str, ("x" * 100_000,)


@pytest.mark.parametrize("sync", [True, False])
def test_arguments_that_take_long_to_pickle_cost_no_more_than_the_time_out(
    place: Place, sync: bool
) -> None:
    a, _ = place.join("a"), place.join("b")
    assert call(a, "b", add, 1, 2) == 3
    Slow.pickled = 0
    with pytest.raises(RpcTimeout, match="on 'b'"):
        if sync:
            call(a, "b", len, [Slow() for _ in range(100)], timeout=0.3)
        else:
            call_async(a, "b", len, [Slow() for _ in range(100)], timeout=0.3).wait()
    # That many take longer, however fast the machine is.
    assert Slow.pickled <= 8
    assert not a.route("b").calls
    assert call(a, "b", len, [Slow()], timeout=60.0) == 1


@pytest.mark.parametrize("sync", [True, False])
def test_arguments_that_take_long_to_copy_cost_no_more_than_the_time_out(
    place: Place, sync: bool
) -> None:
    a, _ = place.join("a"), place.join("b")
    assert call(a, "b", add, 1, 2) == 3
    sharing = a.route("b").sharing
    assert sharing is not None
    copy = sharing.place

    seconds = 0.5 * pace()

    def copy_late(*args: Any, **options: Any) -> Any:
        time.sleep(1.2 * seconds)
        return copy(*args, **options)

    sharing.place = copy_late  # type: ignore[method-assign]
    tensor = torch.zeros(40 << 20, dtype=torch.uint8)
    with pytest.raises(RpcTimeout) as caught:
        if sync:
            call(a, "b", len, tensor, timeout=seconds)
        else:
            call_async(a, "b", len, tensor, timeout=seconds).wait()
    assert "bytes could be copied" in str(caught.value.__cause__), "it was copied all the same"
    assert not a.route("b").calls
    assert sharing.statistics()["shared_leased"] == 0
    assert call(a, "b", len, tensor, timeout=60.0) == tensor.numel()


def test_a_job_that_had_to_wait_in_line_is_answered(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    b._pool._limit = 1
    assert [each.wait() for each in [call_async(a, "b", nap, each) for each in (0.2, 0.01)]]


def test_a_request_that_nobody_waits_for_gives_its_memory_back(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    b._pool._limit = 1
    GATE.clear()
    busy = call_async(a, "b", wait_at_gate)
    eventually(lambda: b._pool._working)
    waiting = [call_async(a, "b", len, torch.zeros(1 << 20)) for _ in range(4)]
    timed_out = [call_async(a, "b", len, torch.zeros(1 << 20), timeout=0.2) for _ in range(4)]
    sharing = a.route("b").sharing
    assert sharing is not None
    assert sharing.statistics()["shared_leased"] >= 4
    for each in waiting:
        each.cancel()
    for each in timed_out:
        with pytest.raises(RpcTimeout):
            each.wait()
    GATE.set()
    busy.wait()
    eventually(lambda: gc.collect() >= 0 and not sharing.statistics()["shared_leased"])


def test_an_answer_that_nobody_waits_for_gives_its_memory_back(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    assert call(a, "b", add, 1, 2) == 3
    (incoming,) = b.connections.incoming
    assert incoming.sharing is not None
    sharing = incoming.sharing
    GATE.clear()
    futures = [call_async(a, "b", give_at_gate, 1 << 20) for _ in range(2)]
    eventually(lambda: b.queue() == 0)
    futures[0].cancel()
    with pytest.raises(RpcTimeout):
        call(a, "b", give_at_gate, 1 << 20, timeout=0.1)
    # A thread that waits also reads. When it is done, nobody else need read for calls that wait for nothing any more.
    with pytest.raises(RpcTimeout):
        call(a, "b", nap, 0.3, timeout=0.05)
    GATE.set()
    assert futures[1].wait().numel() == 1 << 20
    del futures
    eventually(lambda: sharing.statistics()["shared_leased"] == 0)
    outgoing = a.route("b")
    eventually(lambda: not outgoing._owed)


def test_a_value_of_its_own_that_nobody_wants_any_more_is_not_kept(place: Place) -> None:
    a = place.join("a")
    rref_id, fork_id = a.rrefs.create_remote(a.me.id)
    a.rrefs.failed(fork_id, "no")
    a.rrefs.drop(rref_id)
    a.rrefs.settle()
    a.rrefs.fail_value(rref_id, "no")
    assert not a.rrefs._values
    assert not a.rrefs.why_not_made(rref_id)


def test_who_waits_for_a_value_is_not_kept_when_its_owner_leaves(place: Place) -> None:
    a = place.join("a")
    rref_id, _ = a.rrefs.create_remote(a.me.id)
    told = []
    a.rrefs.value(rref_id).add_done_callback(lambda done, a=a: told.append((a, done)))
    gone = weakref.ref(a)
    place.agents.remove(a)
    a.close()
    assert told
    with pytest.raises(RpcError, match="has left the group"):
        told.pop()[1].value()
    del a
    gc.collect()
    assert gone() is None


def test_a_connection_that_breaks_is_not_looked_into_for_ever(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    assert call(a, "b", add, 1, 2) == 3
    assert call(b, "a", add, 1, 2) == 3
    a.route("b").line._sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(PeerLost):
        call(a, "b", add, 1, 2)
    assert call(a, "b", add, 1, 2) == 3
    dialled = [time.monotonic()]
    for agent in (a, b):
        real = agent.dialer.dial

        def noted(*args: Any, _real: Any = real, **more: Any) -> Any:
            dialled.append(time.monotonic())
            return _real(*args, **more)

        agent.dialer.dial = noted  # type: ignore[method-assign]
    # The one look that there may be takes as long as it takes.
    eventually(lambda: time.monotonic() - dialled[-1] > 0.8, 10.0 * pace())


def test_a_value_that_never_comes_is_not_expected_for_ever(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    rref_id, _ = a.rrefs.create_remote(b.me.id)
    with pytest.raises(RpcTimeout):
        a.call_sync("b", Kind.FETCH, "to_here()", (rref_id,), 0.1)
    eventually(lambda: not b.rrefs._values)
    assert b.is_idle()
    assert not any(b.rrefs.diagnostics().values())


def test_a_value_that_was_released_is_refused_at_once(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    rref_id = b.rrefs.own(7)
    assert a.call_sync("b", Kind.FETCH, "to_here()", (rref_id,), 1.0) == 7
    b.rrefs.drop(rref_id)
    eventually(lambda: not b.rrefs._values)
    with pytest.raises(RpcError, match="was released"):
        a.call_sync("b", Kind.FETCH, "to_here()", (rref_id,), 1.0)


def test_a_stream_that_runs_out_of_time_is_not_taken_for_complete() -> None:
    said: list[Any] = []

    class Slow:
        """A request whose caller takes two items, and then no more."""

        call = CurrentCall(WorkerInfo("a", 0), time.monotonic() + 0.05)
        context = None

        def flow(self, source: Any) -> None: ...

        def on_cancel(self, act: Any) -> None: ...

        def item(self, value: Any) -> None:
            said.append(value)

        def end_stream(self) -> None:
            said.append("end")

        def give_up(self) -> None:
            said.append("given up")

    ItemSource(Slow(), 2, CoroutineLoop("idle")).run(count, (5,), None)  # type: ignore[arg-type]
    assert said == [0, 1, "given up"]


def test_a_connection_lost_while_its_agent_closes_is_closed(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    assert call(a, "b", add, 1, 2) == 3
    (incoming,) = b.connections.incoming
    b._pool.submit = lambda _: None  # type: ignore[method-assign]  # it is closing: nobody takes jobs
    incoming.end("as if it had broken")
    b.close()
    assert incoming.line._sock.fileno() == -1


def test_a_call_that_failed_keeps_nothing(place: Place) -> None:
    a = place.join("a")
    dies(place.join("b"))

    class Large:
        pass

    def fail() -> weakref.ref[Large]:
        large = Large()  # held by the frame that calls
        with pytest.raises(PeerLost):
            call_async(a, "b", add, 1, 2).wait()
        return weakref.ref(large)

    kept = [fail() for _ in range(3)]
    gc.collect()
    assert [each() for each in kept] == [None] * 3


def test_a_worker_that_has_gone_is_lost_and_not_unknown(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    rank = b.me.id
    b.group.leave("it was tired")
    b.close()
    # Until a's watcher has read that, the error says that nobody listens there.
    eventually(lambda: all(each.name != "b" for each in a.group.members()[1]))
    for to in ("b", rank, WorkerInfo("b", rank)):
        with pytest.raises(PeerLost, match="'b' is lost: could not find destination.*it was tired"):
            call(a, to, add, 1, 2)  # type: ignore[arg-type]
    with pytest.raises(RpcError) as caught:
        call(a, "c", add, 1, 2)
    assert not isinstance(caught.value, PeerLost)


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


def test_a_coroutine_whose_time_is_up_is_not_taken_for_cancelled(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    for _ in range(10):
        # The callee is told whole milliseconds, rounded down, so its time is up first.
        with pytest.raises(RpcTimeout):
            call(a, "b", sleep, 1.0, timeout=0.0209)
    eventually(b.is_idle)


def test_who_died_before_anybody_was_connected_to_it_does_not_stay_a_member(place: Place) -> None:
    a, c = place.join("a"), place.join("c")
    dies(place.join("b"))
    with pytest.raises(PeerLost, match="refused"):
        call(a, "b", add, 1, 2)
    eventually(lambda: [each.name for each in c.infos()] == ["a", "c"])


def test_who_cannot_be_reached_for_other_reasons_stays_a_member(place: Place) -> None:
    a = place.join("a", "uds")
    place.join("b", "tcp")
    never_answers(place, "c", "uds")
    with pytest.raises(PeerLost, match="offers tcp"):
        call(a, "b", add, 1, 2)
    with pytest.raises(RpcTimeout):
        call(a, "c", add, 1, 2, timeout=0.2)
    time.sleep(0.3)
    assert [each.name for each in a.infos()] == ["a", "b", "c"]


def test_a_descriptor_that_does_not_come_is_the_loss_of_the_peer(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    assert call(a, "b", add, 1, 2) == 3
    (incoming,) = b.connections.incoming
    assert incoming.sharing is not None
    incoming.sharing._announce = lambda _: True  # type: ignore[method-assign]  # it is not sent
    with pytest.raises(PeerLost, match="descriptor"):
        call(a, "b", give, 1 << 20)
    assert call(a, "b", give, 1 << 20).numel() == 1 << 20


def test_who_leaves_does_not_say_that_its_callers_have_given_up(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    future = call_async(a, "b", sleep, 5.0)
    eventually(b.service.loop.count)
    b.close()
    with pytest.raises(PeerLost):
        future.wait()


def test_references_in_messages_that_a_broken_connection_lost_are_let_go(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    assert call(a, "b", add, 1, 2) == 3
    rref_id = a.rrefs.own(7)
    came, lost = (a.rrefs.fork_owned(rref_id, b.me.id, "") for _ in range(2))
    b.rrefs.receive(came)
    outgoing = a.route("b")
    outgoing.sent_references.add([came, lost], a.rrefs.unsettled)
    assert a.rrefs.diagnostics()["forks"] == 2
    outgoing.line._sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: a.rrefs.diagnostics()["forks"] == 1)
    # A reference that arrived on the old connection but is read only later no longer counts.
    assert b.rrefs.receive(lost).gone
    assert b.rrefs.is_confirmed(came.fork_id)


def test_an_answer_that_does_not_leave_takes_its_references_back(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    assert call(a, "b", add, 1, 2) == 3
    (incoming,) = b.connections.incoming
    incoming.end("the caller has gone")
    request = Request(b.service, incoming, Frame(Kind.CALL, 0, 9, 0, b"", ()))
    fork = b.rrefs.fork_owned(b.rrefs.own(7), a.me.id, "")
    tensors = TensorWriter()
    tensors.forks.append(fork)
    taken: list[Any] = []
    payload.when_unsent(taken.extend)
    request._reply(Kind.REPLY, b"", tensors)
    payload.when_unsent(_take_back)
    assert taken == [fork]


def test_who_waits_for_an_own_value_that_never_comes_waits_no_longer_than_the_caller(
    place: Place,
) -> None:
    a, b = place.join("a"), place.join("b")
    rref_id, fork_id = a.rrefs.create_remote(b.me.id)
    fork = a.rrefs.fork_user(fork_id, b.me.id, "")
    CURRENT[:] = [b]
    with pytest.raises(RpcTimeout):
        call(a, "b", wait_for_own, fork, timeout=0.2)
    eventually(lambda: b.is_idle() and not b._pool._working)
    eventually(lambda: gc.collect() >= 0 and rref_id not in b.rrefs._values)


def wait_for_own(fork: Any) -> Any:
    """Receive a reference as if it were the argument, and wait for its value here."""
    agent = CURRENT[0]
    agent.rrefs.receive(fork)
    return RRef._of_own(agent, fork.rref_id).local_value()


CURRENT: list[Agent] = []


def test_a_fetch_that_was_given_up_before_it_began_leaves_nothing(place: Place) -> None:
    a, b = place.join("a"), place.join("b")
    assert call(a, "b", add, 1, 2) == 3
    (incoming,) = b.connections.incoming
    rref_id, _ = a.rrefs.create_remote(b.me.id)
    request = Request(b.service, incoming, Frame(Kind.FETCH, 0, 9, 0, b"", ()))
    request.cancel()
    b.rrefs.serve(request, Kind.FETCH, (rref_id,))
    assert not b.rrefs._values
    # The thread that has answered may hold its lock a moment longer.
    eventually(lambda: incoming.is_idle)


def test_calls_of_a_worker_that_leaves_end_before_its_peers_have_read_all_answers(
    place: Place,
) -> None:
    a, b = place.join("a"), place.join("b")
    assert call(b, "a", add, 1, 2) == 3
    future = call_async(a, "b", nap, 1.0)
    (incoming,) = a.connections.incoming
    ended = threading.Event()
    real = incoming.finish

    def slow(deadline: Any) -> None:
        assert ended.wait(5.0)
        real(deadline)

    incoming.finish = slow  # type: ignore[method-assign]
    future.add_done_callback(lambda _: ended.set())
    a.close()
    with pytest.raises(PeerLost):
        future.wait()
    assert ended.is_set()
