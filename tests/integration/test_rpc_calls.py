"""Calls: what arrives, what comes back, how long it may take, and what becomes of it when nobody wants it."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import rpc_workers
from pace import pace
from rallypoint import rpc
from rallypoint.errors import DeadlineExceeded
from rpc_workers import Workers, eventually, timed


pytestmark = pytest.mark.integration


@pytest.fixture
def trio() -> Iterator[Workers]:
    """w0, w1, w2, with two threads each; they leave in peace, and then hold nothing."""
    with Workers(3) as workers:
        before = workers.run(rpc_workers.resources)
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=2))
        yield workers
        workers.run(rpc_workers.leave)
        # torch's threads may close a socket a moment later.
        with contextlib.suppress(AssertionError):
            eventually(lambda: workers.run(rpc_workers.resources) == before, 5.0)
        assert workers.run(rpc_workers.resources) == before


# -- what workers call ------------------------------------------------------------------------------

happened: list[Any] = []
gate = threading.Event()


def note(what: Any) -> None:
    happened.append(what)


def note_both_ends_of_long() -> None:
    happened.append("long")
    time.sleep(0.01)
    happened.append("long")


def note_both_ends_of_short() -> None:
    happened.append("short")
    time.sleep(0.0005)
    happened.append("short")


def seen() -> list[Any]:
    return list(happened)


def forget() -> None:
    happened.clear()
    gate.clear()


def open_gate() -> None:
    gate.set()


def hear_cancellations(count: int) -> None:
    """Wait until this worker knows of this many calls that nobody waits for any more."""
    deadline = time.monotonic() + 9
    connections = rpc.api._get_current_rpc_agent().connections
    while True:
        served = [each for one in connections.all_incoming() for each in list(one.active.values())]
        if sum(each._call is not None and each._call.cancelled for each in served) == count:
            return
        assert time.monotonic() < deadline, f"{served} are there"
        time.sleep(0.005)


def wait_for_gate() -> None:
    happened.append("waits")
    assert gate.wait(10)


def double(x: Any) -> Any:
    return 2 * x


def echo(x: Any) -> Any:
    return x


def keywords(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def who() -> str:
    return rpc.get_worker_info().name


class Adder:
    def __init__(self, base: int = 0) -> None:
        self.base = base

    def add(self, x: int) -> int:
        return self.base + x

    @classmethod
    def made(cls, base: int) -> "Adder":
        return cls(base)

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x


async def doze(seconds: float, value: Any = None) -> Any:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        happened.append("cancelled")
        raise
    return value


async def note_and_doze(seconds: float) -> None:
    happened.append("dozes")
    await doze(seconds)


def caller_and_time() -> Any:
    call = rpc.current_call()
    return call.caller, call.time_left()


async def caller_and_time_later() -> Any:
    await asyncio.sleep(0.01)
    call = rpc.current_call()
    return call.caller.name, call.time_left()


def ask(to: Any, func: Any, args: Any = (), timeout: float = -1.0) -> Any:
    return rpc.rpc_sync(to, func, args, timeout=timeout)


def bounce(left: int) -> int:
    """Call the next worker, which calls the next …"""
    if not left:
        return 0
    return 1 + rpc.rpc_sync((rpc.get_worker_info().id + 1) % 3, bounce, (left - 1,))


def bounce_by_future(left: int) -> int:
    if not left:
        return 0
    return (
        1 + rpc.rpc_async((rpc.get_worker_info().id + 1) % 3, bounce_by_future, (left - 1,)).wait()
    )


def watch_cancelled(seconds: float) -> bool:
    happened.append("begun")
    until = time.monotonic() + seconds
    while time.monotonic() < until and not rpc.current_call().cancelled:
        time.sleep(0.001)
    happened.append(("cancelled", rpc.current_call().cancelled))
    return rpc.current_call().cancelled


@rpc.async_execution
def chained(to: str, x: int) -> Any:
    return rpc.rpc_async(to, double, (x,)).then(lambda done: done.value() + 1)


class Relay:
    @staticmethod
    @rpc.async_execution
    def ask(to: str, x: int) -> Any:
        return rpc.rpc_async(to, double, (x,))


class OddError(Exception):
    """Its constructor takes something other than what it passes to Exception."""

    def __init__(self, code: int, *, place: str) -> None:
        super().__init__(f"odd {code} at {place}")
        self.code = code
        self.place = place


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Nothing can be assigned to it, not even a traceback."""

    code: int


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("I have no text")


class LocalOnlyError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("I do not travel")

    def __init__(self, lock: Any) -> None:
        super().__init__("it broke here")
        self.lock = lock


def fail(kind: str) -> None:
    match kind:
        case "value":
            raise ValueError("bad\nvalue \\n äöü")
        case "odd":
            raise OddError(7, place="there")
        case "local":
            raise LocalOnlyError(threading.Lock())
        case "noted":
            error = KeyError("key")
            error.add_note("look into the cupboard")
            raise error
        case "group":
            raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "frozen":
            raise FrozenError(7)
        case "mute":
            raise MuteError
        case "stop":
            raise StopIteration("at the end")


async def fail_later(kind: str) -> None:
    await asyncio.sleep(0)
    fail(kind)


async def fail_beside(kind: str) -> None:
    """Fail in a task of its own, which nobody waits for until it has failed."""
    beside = asyncio.create_task(fail_later(kind))
    await asyncio.sleep(0.01)
    await beside


async def items_that_fail(kind: str) -> Any:
    yield 1
    fail(kind)


@rpc.async_execution
def fail_by_future(kind: str) -> Any:
    answer: torch.futures.Future[None] = torch.futures.Future()
    try:
        fail(kind)
    except Exception as error:  # the answer
        answer.set_exception(error)
    return answer


@rpc.async_execution
def fail_with_a_witness(kind: str) -> Any:
    answer: torch.futures.Future[None] = torch.futures.Future()
    error = OddError(7, place=kind)
    error.witness = Witness()
    witnesses.append(weakref.ref(error.witness))
    answer.set_exception(error)
    return answer


def fail_late_with_a_witness(kind: str) -> None:
    witness = Witness()
    witnesses.append(weakref.ref(witness))
    time.sleep(0.3)
    fail(kind)


class Witness:
    """Lives as long as what refers to it."""


witnesses: list[Any] = []


def witnesses_left() -> int:
    gc.collect()
    return sum(each() is not None for each in witnesses)


def unpicklable(kind: str) -> Any:
    return Unpicklable(kind)


class Unpicklable:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return fail(self.kind)


async def wait_for_failure(kind: str) -> None:
    await rpc.rpc_async("w1", fail, (kind,), timeout=20)


def wait_at_home(kind: str) -> None:
    """Wait on a thread of the pool."""
    rpc.remote(rpc.get_worker_info(), fail, (kind,)).local_value()


class Stubborn:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("I will not go")


class Sticky:
    """It can be sent, but not rebuilt."""

    def __reduce__(self) -> Any:
        return _unmake, ()


def _unmake() -> None:
    raise ZeroDivisionError("I will not arrive")


def make(kind: str) -> Any:
    return {"stubborn": Stubborn, "sticky": Sticky, "lock": threading.Lock}[kind]()


# -- what arrives, and what comes back ----------------------------------------------------------


def test_a_worker_is_called_by_its_name_rank_or_info_and_may_be_oneself(trio):
    def case():
        me, there = rpc.get_worker_info(), rpc.get_worker_info("w2")
        assert (me.name, me.id, there.id) == ("w0", 0, 2)
        return [rpc.rpc_sync(to, who) for to in ("w1", 1, there, "w0", 0, me)]

    assert trio.on(0, case) == ["w1", "w1", "w2", "w0", "w0", "w0"]


def test_arguments_of_every_form_arrive_and_a_list_of_them_is_fine(trio):
    def case():
        assert rpc.rpc_sync("w1", keywords, (1, "a"), {"k": None}) == ((1, "a"), {"k": None})
        assert rpc.rpc_sync("w1", keywords, [1, 2]) == ((1, 2), {})
        assert rpc.rpc_sync("w1", keywords, kwargs={"timeout": 3}) == ((), {"timeout": 3})
        assert rpc.rpc_async("w1", keywords).wait() == ((), {})
        assert rpc.remote("w1", keywords, (1,), {"x": 2}).to_here() == ((1,), {"x": 2})

    trio.on(0, case)


def test_methods_classes_operators_and_partials_are_functions_too(trio):
    def case():
        adder = Adder(10)
        assert rpc.rpc_sync("w1", adder.add, (5,)) == 15
        adder.base = 20  # a bound method says what its object holds now
        assert rpc.rpc_sync("w1", adder.add, (5,)) == 25
        assert rpc.rpc_sync("w1", Adder, (3,)).base == 3
        assert rpc.rpc_sync("w1", Adder).base == 0
        assert rpc.rpc_sync("w1", Adder.made, (4,)).base == 4
        assert rpc.rpc_sync("w1", Adder.twice, (4,)) == 8
        assert rpc.rpc_sync("w1", functools.partial(double, 4)) == 8
        assert rpc.rpc_sync("w1", min, (3, 2)) == 2
        assert rpc.rpc_sync("w1", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
        assert rpc.rpc_sync("w1", torch.relu, (torch.tensor([-1.0, 1.0]),)).tolist() == [0, 1]

    trio.on(0, case)


def test_a_bound_method_without_arguments_is_not_remembered_with_the_object_of_before(trio):
    def case():
        adder = Adder(1)
        found = []
        for base in (1, 2, 3):
            adder.base = base
            found.append(rpc.rpc_sync("w1", adder.__class__.made, (base,)).base)
            found.append(rpc.rpc_sync("w1", functools.partial(adder.add, 0)))
        return found

    assert trio.on(0, case) == [1, 1, 2, 2, 3, 3]


def test_tensors_keep_what_they_are_at_every_size_in_both_directions(trio):
    def case():
        for count in (0, 1, 100, 5_000, 300_000, 3_000_000):
            sent = torch.arange(count, dtype=torch.float32)
            back = rpc.rpc_sync("w1", double, (sent,))
            assert back.dtype == sent.dtype
            assert torch.equal(back, 2 * sent), count
        grid = torch.arange(12.0).reshape(3, 4).t()
        back = rpc.rpc_sync("w1", echo, (grid,))
        assert torch.equal(back, grid)
        assert back.stride() == grid.stride()

    trio.on(0, case)


def test_a_tensor_that_came_may_be_written_to_and_is_nobody_elses(trio):
    def case():
        sent = torch.zeros(200_000)
        first, second = rpc.rpc_sync("w1", echo, (sent,)), rpc.rpc_sync("w1", echo, (sent,))
        first += 1
        assert not sent.any()
        assert not second.any()
        third = rpc.rpc_sync("w1", echo, (sent,))
        assert not third.any()
        assert first.all()

    trio.on(0, case)


def test_tensors_that_are_kept_are_not_overwritten_by_the_next_ones(trio):
    def case():
        kept = [rpc.rpc_sync("w1", double, (torch.full((40_000,), i),)) for i in range(30)]
        assert [int(each.unique()) for each in kept] == [2 * i for i in range(30)]
        sent = [rpc.rpc_async("w1", double, (torch.full((40_000,), i),)) for i in range(30)]
        assert [int(each.wait().unique()) for each in sent] == [2 * i for i in range(30)]

    trio.on(0, case)


def test_the_modes_of_the_thread_that_reads_do_not_change_what_arrives(trio):
    def case():
        weights = torch.ones(2, 3, requires_grad=True)
        for mode in (torch.inference_mode, torch.no_grad):
            # This thread reads its answer while it waits for the other call's.
            other = rpc.rpc_async("w1", echo, (torch.ones(2, 3),))
            with mode():
                rpc.rpc_sync("w1", nap, (0.1,))
                own = rpc.rpc_sync("w1", echo, (torch.ones(2, 3),))
            for found in (other.wait(), own):
                assert not found.is_inference()
                (found * weights).sum().backward()
                found.add_(weights).sum().backward()

    trio.on(0, case)


def leave_without_gradients() -> None:
    torch.set_grad_enabled(False)


def add_in_place(tensor: torch.Tensor) -> bool:
    with torch.enable_grad():
        tensor.add_(torch.ones(2, 3, requires_grad=True))
    return tensor.requires_grad


def test_a_function_that_leaves_its_thread_in_a_mode_does_not_change_later_arguments():
    def case():
        rpc.rpc_sync("w1", leave_without_gradients)
        return [rpc.rpc_sync("w1", add_in_place, (torch.ones(2, 3),)) for _ in range(4)]

    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=1))
        assert workers.on(0, case) == [True] * 4
        workers.run(rpc_workers.leave)


def test_every_thread_gets_its_own_answer(trio):
    def case():
        def one(number):
            for i in range(60):
                to = f"w{1 + (number + i) % 2}"
                if i % 3:
                    assert rpc.rpc_sync(to, double, (1000 * number + i,)) == 2 * (1000 * number + i)
                else:
                    sent = torch.full((20_000,), number)
                    assert rpc.rpc_async(to, double, (sent,)).wait()[-1] == 2 * number

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(one, range(8)))

    trio.on(0, case)


def test_workers_that_all_call_each_other_all_get_their_answers(trio):
    def case():
        me = rpc.get_worker_info().id
        futures = [
            rpc.rpc_async((me + 1 + i % 2) % 3, double, (torch.full((5_000,), i),))
            for i in range(100)
        ]
        assert [int(each.wait()[0]) for each in futures] == [2 * i for i in range(100)]

    trio.run(case)


def test_many_calls_under_way_at_once_are_all_answered(trio):
    def case():
        futures = [rpc.rpc_async(1 + i % 2, double, (i,)) for i in range(3_000)]
        return sum(each.wait() for each in futures)

    assert trio.on(0, case) == 2 * sum(range(3_000))


# -- asynchronous functions ---------------------------------------------------------------------


def test_async_def_functions_run_beside_each_other_whatever_the_number_of_threads(trio):
    def case():
        with timed(0.9):
            futures = [rpc.rpc_async("w1", doze, (0.2, i)) for i in range(50)]
            assert [each.wait() for each in futures] == list(range(50))

    trio.on(0, case)


def test_a_call_can_be_awaited_in_asyncio(trio):
    def case():
        async def main():
            found = await asyncio.gather(*(rpc.rpc_async("w1", double, (i,)) for i in range(20)))
            with pytest.raises(ValueError, match="bad"):
                await rpc.rpc_async("w1", fail, ("value",))
            return found

        return asyncio.run(main())

    assert trio.on(0, case) == [2 * i for i in range(20)]


def test_a_function_that_answers_later_frees_its_thread(trio):
    def case():
        assert rpc.rpc_sync("w1", chained, ("w2", 5)) == 11
        assert rpc.rpc_sync("w1", Relay.ask, ("w0", 5)) == 10
        futures = [rpc.rpc_async("w1", chained, ("w1", i)) for i in range(40)]
        assert [each.wait() for each in futures] == [2 * i + 1 for i in range(40)]

    trio.on(0, case)


def test_callbacks_may_call_and_wait(trio):
    def case():
        def again(done):
            return rpc.rpc_sync("w2", double, (done.value(),))

        futures = [rpc.rpc_async("w1", double, (i,)).then(again).then(again) for i in range(20)]
        assert [each.wait() for each in futures] == [8 * i for i in range(20)]

    trio.on(0, case)


# -- the pool cannot be used up -----------------------------------------------------------------


@pytest.mark.parametrize("way", [bounce, bounce_by_future])
def test_nested_calls_many_times_deeper_than_there_are_threads_come_back(trio, way):
    def case():
        futures = [rpc.rpc_async("w1", way, (30,)) for _ in range(4)]
        return [each.wait() for each in futures]

    assert trio.run(case, limit=20) == [[30] * 4] * 3


def test_threads_that_are_all_busy_do_not_keep_answers_from_arriving():
    """Both threads are in a call to the other worker, and so are both of its threads."""
    with Workers(3) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=1))

        def case():
            me = rpc.get_worker_info().id
            futures = [
                rpc.rpc_async((me + 1) % 3, ask, ((me + 2) % 3, nap, (0.02,))) for _ in range(10)
            ]
            return [each.wait() for each in futures]

        assert workers.run(case) == [[0.02] * 10] * 3


def ask_many(way: str, to: str, seconds: float, timeout: float) -> int:
    """Wait for several calls by a function of torch's own, which does not say that it waits."""
    futures = [rpc.rpc_async(to, nap, (seconds,), timeout=timeout) for _ in range(3)]
    if way == "wait_all":
        return len(torch.futures.wait_all(futures))
    if way == "then":
        futures = [each.then(lambda done: done.value()) for each in futures]
    return len(torch.futures.collect_all(futures).wait())


@pytest.mark.parametrize("way", ["wait_all", "collect_all", "then"])
def test_functions_that_all_wait_in_code_of_torchs_get_their_answers(way):
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=2))

        def case():
            futures = [rpc.rpc_async("w1", ask_many, (way, "w0", 0.0, 60.0)) for _ in range(5)]
            assert [each.wait() for each in futures] == [3] * 5

        workers.on(0, case)


@pytest.mark.parametrize("end", ["timeout", "loss"])
def test_functions_that_all_wait_in_code_of_torchs_hear_that_there_is_no_answer(end):
    with Workers(3) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=2))

        def case():
            timeout = 0.3 if end == "timeout" else 60.0
            args = ("wait_all", "w2", 60.0, timeout)
            futures = [rpc.rpc_async("w1", ask_many, args) for _ in range(2)]
            kinds = []
            for each in futures:
                with pytest.raises(rpc.RpcError) as caught:
                    each.wait()
                kinds.append(type(caught.value))
            return kinds

        pending = workers.begin(0, case)
        if end == "loss":
            workers.on(2, lambda: eventually(lambda: rpc.statistics()["calls"]["being_served"] > 3))
            workers.kill(2)
        kind = rpc.RpcTimeout if end == "timeout" else rpc.PeerLost
        assert pending.result() == [kind, kind]


def test_no_more_functions_run_at_once_than_there_are_threads():
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=3))

        def case():
            futures = [rpc.rpc_async("w1", run_beside) for _ in range(12)]
            return max(each.wait() for each in futures)

        assert workers.on(0, case) == 3


running = 0
_running_lock = threading.Lock()


def run_beside() -> int:
    global running
    with _running_lock:
        running += 1
        found = running
    time.sleep(0.02)
    with _running_lock:
        found = max(found, running)
        running -= 1
    return found


# -- deadlines ----------------------------------------------------------------------------------


def test_a_call_whose_time_is_up_says_so_in_torchs_words_and_names_callee_and_function(trio):
    def case():
        for make_it in (
            lambda: rpc.rpc_sync("w1", nap, (0.3,), timeout=0.05),
            lambda: rpc.rpc_async("w1", nap, (0.3,), timeout=0.05).wait(),
            lambda: rpc.rpc_async("w1", doze, (0.3,), timeout=0.05).wait(),
        ):
            with timed(0.25, 0.04), pytest.raises(rpc.RpcTimeout) as caught:
                make_it()
            assert isinstance(caught.value, (RuntimeError, TimeoutError, DeadlineExceeded))
            text = str(caught.value)
            assert text.startswith("RPC ran for more than set timeout (50 ms)")
            assert "'w1'" in text
            assert "nap" in text or "doze" in text

    trio.on(0, case)


def test_a_call_whose_time_is_up_before_it_is_connected_names_its_function_and_leaves_nothing(trio):
    def case():
        for make_it in (
            lambda: rpc.rpc_sync("w1", nap, (0.3,), timeout=0.05),
            lambda: rpc.rpc_async("w1", nap, (0.3,), timeout=0.05).wait(),
            lambda: rpc.rpc_stream("w1", range, (3,), timeout=0.05),
        ):
            with pytest.raises(rpc.RpcTimeout) as caught:
                make_it()
            assert re.search(r"(nap|range), waiting for a connection to 'w1'", str(caught.value))

    trio.signal(1, signal.SIGSTOP)
    try:
        trio.on(0, case)
    finally:
        trio.signal(1, signal.SIGCONT)


def test_a_call_without_limit_outlasts_the_default(trio):
    def case():
        rpc.api._set_rpc_timeout(0.1)
        try:
            assert rpc.rpc_sync("w1", nap, (0.2,), timeout=0) == 0.2
            with pytest.raises(rpc.RpcTimeout, match=r"100 ms"):
                rpc.rpc_sync("w1", nap, (0.2,))
        finally:
            rpc.api._set_rpc_timeout(60)

    trio.on(0, case)


def test_the_callee_knows_who_waits_and_how_long(trio):
    def case():
        caller, left = rpc.rpc_sync("w1", caller_and_time, timeout=40)
        assert caller == rpc.get_worker_info()
        assert 20 < left <= 40
        assert rpc.rpc_sync("w1", caller_and_time, timeout=0)[1] is None
        name, left = rpc.rpc_sync("w1", caller_and_time_later, timeout=40)
        assert name == "w0"
        assert 20 < left < 40
        assert rpc.current_call() is None

    trio.on(0, case)


@pytest.mark.parametrize("asked", [-1.0, 0.0, 50.0])
def test_a_nested_call_inherits_what_is_left_whatever_it_asks_for(trio, asked):
    def case():
        _, left = rpc.rpc_sync("w1", ask, ("w2", caller_and_time, (), asked), timeout=40)
        assert 20 < left < 40
        _, left = rpc.rpc_sync("w1", ask, ("w2", caller_and_time, (), 20), timeout=40)
        assert 0 < left <= 20

    trio.on(0, case)


def test_a_nested_call_ends_when_the_first_callers_time_is_up(trio):
    def case():
        with pytest.raises(rpc.RpcTimeout):
            rpc.rpc_sync("w1", ask_and_note, ("w2", 60), timeout=0.5 * pace())
        eventually(lambda: "nested call ended" in rpc.rpc_sync("w1", seen))
        took = next(x for x in rpc.rpc_sync("w1", seen) if isinstance(x, float))
        assert took < 10 * pace()
        rpc.rpc_sync("w1", forget)

    trio.on(0, case)


def ask_and_note(to: str, seconds: float) -> None:
    began = time.monotonic()
    try:
        rpc.rpc_sync(to, doze, (seconds,), timeout=0)
    finally:
        happened.append(time.monotonic() - began)
        happened.append("nested call ended")


tasks: list[asyncio.Task[Any]] = []


async def go_on_beside(to: str) -> None:
    """A task outlives this call, whose deadline passes."""

    async def go_on() -> None:
        note(rpc.current_call() is not None)
        await asyncio.sleep(0.3)
        note(rpc.current_call() is not None)
        try:
            note(await rpc.rpc_async(to, echo, ("answered",)))
        except rpc.RpcError as error:
            note(repr(error))

    tasks.append(asyncio.create_task(go_on()))
    await asyncio.sleep(0)


async def gradients_while_another_waits(how: str) -> list[bool]:
    found = [torch.is_grad_enabled()]
    with torch.no_grad() if how == "no_grad" else torch.inference_mode():
        happened.append("waits")
        await asyncio.get_running_loop().run_in_executor(None, gate.wait, 10)
        found.append(torch.is_grad_enabled())
    return [*found, torch.is_grad_enabled()]


async def has_gradients() -> bool:
    return bool((torch.ones(2, requires_grad=True) * 2).requires_grad)


async def gather_calls(to: str) -> list[Any]:
    first = asyncio.wait_for(rpc.rpc_async(to, double, (1,)), 30)
    return await asyncio.gather(first, rpc.rpc_async(to, double, (2,)), doze(0.01, 6))


def test_a_coroutine_may_wait_for_calls_beside_each_other(trio):
    assert trio.on(0, lambda: rpc.rpc_sync("w1", gather_calls, ("w2",))) == [2, 4, 6]


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_a_coroutine_that_waits_keeps_its_modes_to_itself(trio, how):
    def begin():
        rpc_workers.held["call"] = rpc.rpc_async("w1", gradients_while_another_waits, (how,))
        eventually(lambda: rpc.rpc_sync("w1", seen) == ["waits"])
        assert rpc.rpc_sync("w1", has_gradients)

    trio.on(0, begin)
    trio.on(1, open_gate)
    assert trio.on(0, lambda: rpc_workers.held.pop("call").wait()) == [True, False, True]
    trio.run(forget)


def no_gradients_from_here_on() -> None:
    torch.set_grad_enabled(False)


def test_a_mode_that_a_function_sets_does_not_outlast_it():
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=1))

        def case():
            for _ in range(3):
                rpc.rpc_sync("w1", no_gradients_from_here_on)
                assert rpc.rpc_sync("w1", torch.is_grad_enabled)

        workers.on(0, case)
        workers.run(rpc_workers.leave)


def test_a_task_that_outlives_the_call_that_started_it_does_not_inherit_its_deadline(trio):
    def case():
        rpc.rpc_sync("w1", go_on_beside, ("w2",), timeout=0.2)
        eventually(lambda: len(rpc.rpc_sync("w1", seen)) == 3, 20)
        assert rpc.rpc_sync("w1", seen) == [True, False, "answered"]

    trio.on(0, case)


def test_calls_whose_time_is_up_in_the_queue_are_not_begun():
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=1))

        def case():
            rpc.rpc_async("w1", wait_for_gate)
            late = [rpc.rpc_async("w1", note, (i,), timeout=0.05) for i in range(5)]
            for each in late:
                with pytest.raises(rpc.RpcTimeout):
                    each.wait()

        workers.on(0, case)
        workers.on(1, functools.partial(hear_cancellations, 5))
        workers.on(1, open_gate)
        assert workers.on(0, lambda: rpc.rpc_sync("w1", seen)) == ["waits"]


def test_with_one_thread_a_worker_runs_one_function_at_a_time():
    """A function known to be long is handed over; the short ones behind it, which arrived with it, have to wait."""
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=1))

        def case():
            long, short = note_both_ends_of_long, note_both_ends_of_short
            rpc.rpc_sync("w1", long)
            for _ in range(20):
                calls = [rpc.rpc_async("w1", each) for each in (long, short, short)]
                for each in calls:
                    each.wait()
            happened = rpc.rpc_sync("w1", seen)
            assert happened[::2] == happened[1::2] == ["long", *["long", "short", "short"] * 20]

        workers.on(0, case)


# -- calls that are given up --------------------------------------------------------------------


def test_a_cancelled_call_that_waits_in_line_is_never_begun():
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=1))

        def case():
            busy = rpc.rpc_async("w1", wait_for_gate)
            queued = [rpc.rpc_async("w1", note, (i,)) for i in range(6)]
            assert all(each.cancel() for each in queued[1::2])
            for each in queued[1::2]:
                assert each.cancelled()
                with pytest.raises(rpc.CallCancelled, match=r"note on 'w1' was cancelled"):
                    each.wait()
                assert not each.cancel(), "a second time"
            return busy, queued

        def begin():
            global held
            held = case()

        workers.on(0, begin)
        workers.on(1, functools.partial(hear_cancellations, 3))
        workers.on(1, open_gate)
        workers.on(0, lambda: rpc.rpc_sync("w1", nap, (0,)))
        assert workers.on(1, seen) == ["waits", 0, 2, 4]


def test_a_function_that_is_known_to_be_long_is_not_begun_for_nobody_either():
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=1))

        def begin():
            for _ in range(2):
                rpc.rpc_sync("w1", nap_and_note, ("before",))
            rpc.rpc_async("w1", wait_for_gate)
            _kept, given_up = (rpc.rpc_async("w1", nap_and_note, (i,)) for i in range(2))
            late = rpc.rpc_async("w1", nap_and_note, (2,), timeout=0.05)
            time.sleep(0.1)
            assert given_up.cancel()
            with pytest.raises(rpc.RpcTimeout):
                late.wait()

        workers.on(0, begin)
        workers.on(1, functools.partial(hear_cancellations, 2))
        workers.on(1, open_gate)
        workers.on(0, lambda: rpc.rpc_sync("w1", nap, (0,)))
        assert workers.on(1, seen) == ["before", "before", "waits", 0]


def nap_and_note(what: Any) -> None:
    time.sleep(0.01)
    happened.append(what)


def test_cancelling_ends_a_coroutine_that_runs(trio):
    def case():
        future = rpc.rpc_async("w1", note_and_doze, (60,))
        eventually(lambda: rpc.rpc_sync("w1", seen) == ["dozes"])
        assert future.cancel()
        with timed(0.1), pytest.raises(rpc.CallCancelled):
            future.wait()
        eventually(lambda: rpc.rpc_sync("w1", seen) == ["dozes", "cancelled"])
        rpc.rpc_sync("w1", forget)

    trio.on(0, case)


def test_a_function_that_runs_can_see_that_it_is_not_wanted_any_more(trio):
    def case():
        future = rpc.rpc_async("w1", watch_cancelled, (5,))
        eventually(lambda: rpc.rpc_sync("w1", seen) == ["begun"])
        assert future.cancel()
        eventually(lambda: rpc.rpc_sync("w1", seen) == ["begun", ("cancelled", True)])
        rpc.rpc_sync("w1", forget)

    trio.on(0, case)


def test_a_caller_whose_time_is_up_has_cancelled(trio):
    def case():
        for _ in range(2):
            with pytest.raises(rpc.RpcTimeout):
                rpc.rpc_sync("w1", watch_cancelled, (5 * pace(),), timeout=0.5 * pace())
            eventually(lambda: rpc.rpc_sync("w1", seen) == ["begun", ("cancelled", True)])
            rpc.rpc_sync("w1", forget)

    trio.on(0, case)


def test_a_cancelled_task_of_asyncio_cancels_its_call(trio):
    def case():
        async def main():
            future = rpc.rpc_async("w1", note_and_doze, (60,))
            # A call that is cancelled before it starts never starts, and notes nothing.
            eventually(lambda: rpc.rpc_sync("w1", seen) == ["dozes"])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(future, 0.05)

        asyncio.run(main())
        eventually(lambda: rpc.rpc_sync("w1", seen) == ["dozes", "cancelled"])
        rpc.rpc_sync("w1", forget)

    trio.on(0, case)


def test_an_answer_that_was_there_before_is_not_cancelled(trio):
    def case():
        future = rpc.rpc_async("w1", double, (4,))
        assert future.wait() == 8
        assert not future.cancel()
        assert not future.cancelled()
        assert future.wait() == 8

    trio.on(0, case)


def test_callbacks_of_a_cancelled_call_are_called_once(trio):
    def case():
        found = []
        future = rpc.rpc_async("w1", doze, (10,))
        future.add_done_callback(lambda done: found.append(done.cancelled()))
        future.cancel()
        eventually(lambda: found)
        time.sleep(0.05)
        assert found == [True]
        # It may have been cancelled before it started: then it never does.
        eventually(lambda: rpc.rpc_sync("w1", seen) in ([], ["cancelled"]))
        rpc.rpc_sync("w1", forget)

    trio.on(0, case)


# -- memory -------------------------------------------------------------------------------------


def test_no_more_bytes_are_under_way_to_one_worker_than_allowed():
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, in_flight_bytes=1_000_000))

        def case():
            most = 0
            stop = threading.Event()

            def look():
                nonlocal most
                while not stop.is_set():
                    for each in rpc.statistics()["peers"]:
                        most = max(most, each.get("bytes_in_flight", 0))
                    time.sleep(0.0005)

            watcher = threading.Thread(target=look)
            rpc.rpc_sync("w1", who)
            watcher.start()
            with timed(5, 0.1):
                futures = [
                    rpc.rpc_async("w1", nap_with, (0.03, torch.ones(100_000))) for _ in range(10)
                ]
                assert [each.wait() for each in futures] == [100_000] * 10
            # A call that is larger than the whole allowance goes alone.
            assert rpc.rpc_sync("w1", nap_with, (0, torch.ones(1_000_000))) == 1_000_000
            stop.set()
            watcher.join()
            assert 400_000 <= most <= 4_000_000
            eventually(lambda: rpc.statistics()["peers"][0]["bytes_in_flight"] == 0)
            return most

        workers.on(0, case)


def nap_with(seconds: float, tensor: torch.Tensor) -> int:
    time.sleep(seconds)
    return tensor.numel()


def test_a_call_that_finds_no_room_before_its_time_is_up_takes_none():
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, in_flight_bytes=1_000_000))

        def case():
            busy = rpc.rpc_async("w1", nap_with, (0.3, torch.ones(200_000)))
            with timed(0.25, 0.09), pytest.raises(rpc.RpcTimeout):
                rpc.rpc_sync("w1", nap_with, (0, torch.ones(200_000)), timeout=0.1)
            assert busy.wait() == 200_000
            assert rpc.rpc_sync("w1", nap_with, (0, torch.ones(200_000)), timeout=1) == 200_000
            assert rpc.statistics()["peers"][0]["bytes_in_flight"] == 0

        workers.on(0, case)


def count_at_caller(tensor: torch.Tensor) -> int:
    return rpc.rpc_sync(rpc.current_call().caller, torch.numel, (tensor,))


def have_counted(times: int) -> list[int]:
    futures = [rpc.rpc_async("w0", count_at_caller, (torch.ones(200_000),)) for _ in range(times)]
    return [each.wait() for each in futures]


def test_a_function_that_waits_for_room_takes_no_thread_from_those_who_make_it():
    with Workers(2) as workers:
        workers.run(
            functools.partial(rpc_workers.join, num_worker_threads=1, in_flight_bytes=1_000_000)
        )
        assert workers.on(0, lambda: rpc.rpc_sync("w1", have_counted, (4,))) == [200_000] * 4


def nap_and_count_at_caller(tensor: torch.Tensor) -> int:
    time.sleep(0.3)
    return count_at_caller(tensor)


def test_two_that_pass_each_other_what_they_have_got_do_not_wait_for_each_other():
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, in_flight_bytes=1_000_000))

        def case(to):
            with timed(5):
                return rpc.rpc_sync(to, nap_and_count_at_caller, (torch.ones(200_000),), timeout=10)

        begun = [workers.begin(0, case, "w1"), workers.begin(1, case, "w0")]
        assert [each.result() for each in begun] == [200_000] * 2


# -- errors -------------------------------------------------------------------------------------


def test_what_a_function_raises_keeps_its_type_and_text_and_tells_where(trio):
    def case():
        for to in ("w1", "w0"):
            with pytest.raises(ValueError) as caught:
                rpc.rpc_sync(to, fail, ("value",))
            assert str(caught.value) == "bad\nvalue \\n äöü"
            cause = str(caught.value.__cause__)
            assert cause.startswith(f"on {to}\n")
            assert 'raise ValueError("bad' in cause
            # It shows nothing of how the call was made, on either side: only what people have written.
            assert "rallypoint/rpc/" not in cause
            steps = traceback.extract_tb(caught.value.__traceback__)
            assert [each.name for each in steps[1:]] == ["rpc_sync", "call_sync"]
        with pytest.raises(OddError) as caught:
            rpc.rpc_async("w1", fail, ("odd",)).wait()
        assert (caught.value.code, caught.value.place) == (7, "there")
        with pytest.raises(KeyError) as caught:
            rpc.rpc_sync("w1", fail, ("noted",))
        assert caught.value.__notes__ == ["look into the cupboard"]
        with pytest.raises(ExceptionGroup) as caught:
            rpc.rpc_sync("w1", fail, ("group",))
        assert [type(each) for each in caught.value.exceptions] == [ValueError, TypeError]
        with pytest.raises(TypeError, match="double"):
            rpc.rpc_sync("w1", double, (1, 2))

    trio.on(0, case)


def test_what_cannot_be_made_again_here_arrives_as_text(trio):
    def case():
        with pytest.raises(rpc.RemoteError) as caught:
            rpc.rpc_sync("w1", fail, ("local",))
        text = str(caught.value)
        assert text.startswith("Original exception on remote side was on w1: ")
        assert "LocalOnlyError: it broke here" in text
        assert "raise LocalOnlyError" in text
        assert caught.value.worker == "w1"

    trio.on(0, case)


@pytest.mark.parametrize(
    ("kind", "words"), [("exit", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt")]
)
def test_what_would_end_a_program_ends_neither_caller_nor_callee_nor_its_threads(trio, kind, words):
    def case():
        for _ in range(3):
            with pytest.raises(rpc.RemoteError, match=words):
                rpc.rpc_sync("w1", fail, (kind,))
            with pytest.raises(rpc.RemoteError, match=words):
                rpc.rpc_async("w1", fail, (kind,)).wait()
            with pytest.raises(rpc.RemoteError, match=words):
                rpc.remote("w1", fail, (kind,)).to_here(timeout=2)
        with pytest.raises((StopIteration, RuntimeError), match="at the end"):
            rpc.rpc_sync("w1", fail, ("stop",))
        return rpc.rpc_sync("w1", double, (2,))

    assert trio.on(0, case) == 4


# Each way in which a caller is told of an error of these classes.
WAYS_TO_FAIL: dict[str, Any] = {
    "sync": lambda to, kind: rpc.rpc_sync(to, fail, (kind,), timeout=20),
    "async": lambda to, kind: rpc.rpc_async(to, fail, (kind,), timeout=20).wait(),
    "await": lambda _, kind: asyncio.run(wait_for_failure(kind)),
    "coroutine": lambda to, kind: rpc.rpc_sync(to, fail_later, (kind,), timeout=20),
    "future": lambda to, kind: rpc.rpc_sync(to, fail_by_future, (kind,), timeout=20),
    "then": lambda to, kind: (
        rpc.rpc_async(to, fail, (kind,), timeout=20).then(lambda done: done.wait()).wait()
    ),
    "stream": lambda to, kind: list(rpc.rpc_stream(to, items_that_fail, (kind,), timeout=20)),
    "remote": lambda to, kind: rpc.remote(to, fail, (kind,), timeout=20).to_here(timeout=20),
    "local value": lambda to, kind: rpc.rpc_sync(to, wait_at_home, (kind,), timeout=20),
    "argument": lambda to, kind: rpc.rpc_sync(to, double, (Unpicklable(kind),), timeout=20),
    "result": lambda to, kind: rpc.rpc_sync(to, unpicklable, (kind,), timeout=20),
}


@pytest.mark.parametrize(
    ("kind", "expected"), [("frozen", FrozenError), ("mute", MuteError)], ids=["frozen", "mute"]
)
@pytest.mark.parametrize("way", WAYS_TO_FAIL)
def test_an_error_that_forbids_assignments_or_has_no_text_is_told_as_any_other(
    trio, way, kind, expected
):
    def case():
        for to in ("w1", "w0"):
            with pytest.raises(expected) as caught:
                WAYS_TO_FAIL[way](to, kind)
            if kind == "frozen":
                assert caught.value.code == 7

    trio.on(0, case)


def test_a_future_with_an_error_is_not_kept_once_the_caller_has_it(trio):
    def case():
        for _ in range(3):
            with pytest.raises(OddError):
                rpc.rpc_sync("w1", fail_with_a_witness, ("here",))
        # The thread that answered may still be about to release it.
        eventually(lambda: rpc.rpc_sync("w1", witnesses_left) == 0, 10)

    trio.on(0, case)


@pytest.mark.parametrize("kind", ["odd", "exit"])
def test_a_value_whose_error_is_waited_for_keeps_nothing_of_the_call(trio, kind):
    def case():
        held = rpc.remote("w1", fail_late_with_a_witness, (kind,))
        with pytest.raises((OddError, rpc.RemoteError)):
            held.to_here(timeout=20)  # starts to wait before there is an error
        eventually(lambda: rpc.rpc_sync("w1", witnesses_left) == 0, 10)

    trio.on(0, case)


def test_a_block_that_waits_for_all_lets_any_error_through(trio):
    def wait_for_all() -> None:
        with rpc.api._wait_all():
            futures.append(rpc.rpc_async("w1", double, (2,)))
            fail("frozen")

    def case():
        with pytest.raises(FrozenError):
            wait_for_all()
        return futures[0].done()

    futures: list[Any] = []
    assert trio.on(0, case)


@pytest.mark.parametrize(
    ("kind", "words"), [("exit", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt")]
)
@pytest.mark.parametrize("function", [fail_later, fail_beside])
def test_what_would_end_a_program_does_not_end_the_loop_of_coroutines(trio, function, kind, words):
    def case():
        slow = rpc.rpc_async("w1", doze, (0.2, "slept"))
        for _ in range(3):
            with pytest.raises(rpc.RemoteError, match=words):
                rpc.rpc_sync("w1", function, (kind,), timeout=20)
            with pytest.raises(rpc.RemoteError, match=words):
                rpc.remote("w1", function, (kind,)).to_here(timeout=20)
            with pytest.raises(rpc.RemoteError, match=words):
                list(rpc.rpc_stream("w1", items_that_fail, (kind,), timeout=20))
        assert slow.wait() == "slept"
        return rpc.rpc_sync("w1", doze, (0, "awake"), timeout=20)

    assert trio.on(0, case) == "awake"


def test_a_callee_that_cannot_print_its_errors_still_tells_them(trio):
    def close_output():
        sys.stderr.close()

    def case():
        for _ in range(3):
            with pytest.raises(ValueError, match="bad"):
                rpc.rpc_sync("w1", fail, ("value",))
        assert rpc.rpc_sync("w1", double, (2,)) == 4

    class Strange:
        def write(self, _: str) -> int:
            raise RuntimeError("I print nothing")

    def replace_output():
        sys.stderr = Strange()

    for spoil in (close_output, replace_output):
        trio.on(1, spoil)
        trio.on(0, case)


def test_an_error_crosses_two_workers_with_both_tracebacks(trio):
    def case():
        with pytest.raises(ValueError) as caught:
            rpc.rpc_sync("w1", ask, ("w2", fail, ("value",)))
        text = str(caught.value.__cause__)
        assert text.startswith("on w1\n")
        assert "on w2\n" in text
        assert "in ask" in text
        assert "in fail" in text

    trio.on(0, case)


def test_unknown_workers_are_refused_at_once_with_those_there_are(trio):
    def case():
        for to in ("nobody", 3, -1):
            for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.rpc_stream):
                with timed(0.5), pytest.raises(rpc.RpcError) as caught:
                    call(to, double, (1,))
                assert str(caught.value).startswith("could not find destination ")
                assert "w0" in str(caught.value)
                assert "w2" in str(caught.value)
        for to in (1.0, None, True, ("w1",)):
            with pytest.raises(ValueError, match="expected the name, rank or WorkerInfo"):
                rpc.rpc_sync(to, double, (1,))
        for to in (np.int64(1), torch.tensor(1)):
            assert rpc.rpc_sync(to, double, (1,)) == 2
            assert rpc.get_worker_info(to).name == "w1"
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.rpc_stream):
            with pytest.raises(TypeError, match="kwargs is {1: 2}: expected names of arguments"):
                call("w1", double, kwargs={1: 2})

    trio.on(0, case)


def test_what_is_no_function_is_refused_before_it_is_sent(trio):
    def case():
        sent = rpc.statistics()["calls"]["sent"]
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.rpc_stream):
            with pytest.raises(TypeError, match="function should be callable"):
                call("w1", "double", (1,))
        assert rpc.statistics()["calls"]["sent"] == sent

    trio.on(0, case)


def test_arguments_that_cannot_be_pickled_raise_here_and_leave_nothing_behind(trio):
    def case():
        for argument in (Stubborn(), threading.Lock(), (x for x in [])):
            for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.rpc_stream):
                with timed(0.5), pytest.raises((ZeroDivisionError, TypeError)) as caught:
                    call("w1", echo, (argument,))
                assert "pickle" in str(caught.value) or "I will not go" in str(caught.value)
        with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
            rpc.rpc_sync("w1", echo, (torch.futures.Future(),))
        eventually(lambda: rpc.statistics()["calls"]["under_way"] == 0)
        assert rpc.rpc_sync("w1", double, (2,)) == 4

    trio.on(0, case)


def test_arguments_that_cannot_be_made_again_there_raise_here(trio):
    def case():
        for call in (rpc.rpc_sync, lambda *a: rpc.rpc_async(*a).wait()):
            with pytest.raises(ZeroDivisionError, match="I will not arrive"):
                call("w1", echo, (Sticky(),))
        with pytest.raises(ZeroDivisionError, match="I will not arrive"):
            rpc.remote("w1", echo, (Sticky(),)).to_here(timeout=2)
        with pytest.raises(ZeroDivisionError, match="I will not arrive"):
            list(rpc.rpc_stream("w1", echo, (Sticky(),), timeout=2))
        assert rpc.rpc_sync("w1", double, (2,)) == 4

    trio.on(0, case)


@pytest.mark.parametrize("kind", ["stubborn", "lock", "sticky"])
def test_results_that_cannot_travel_raise_here_and_the_connection_goes_on(trio, kind):
    def case():
        for call in (rpc.rpc_sync, lambda *a: rpc.rpc_async(*a).wait()):
            with timed(0.5), pytest.raises((ZeroDivisionError, TypeError, rpc.RemoteError)):
                call("w1", make, (kind,))
        assert rpc.rpc_sync("w1", double, (2,)) == 4

    trio.on(0, case)


def test_a_function_that_the_callee_does_not_have_is_named(trio):
    def case():
        def local():
            return 1

        with pytest.raises((AttributeError, TypeError)):
            rpc.rpc_sync("w1", local)
        only_here.__module__ = __name__
        sys.modules[echo.__module__].only_here = only_here
        only_here.__module__ = echo.__module__
        only_here.__qualname__ = "only_here"
        with pytest.raises(RuntimeError, match="RPC pickler does not serialize function code") as e:
            rpc.rpc_sync("w1", only_here)
        assert "only_here" in str(e.value)
        assert "pickle_by_value" in str(e.value)

    def only_here():
        return 1

    trio.on(0, case)


def test_functions_without_a_name_travel_by_value_where_that_is_asked_for():
    with Workers(2) as workers:
        workers.run(functools.partial(rpc_workers.join, pickle_by_value=True))

        def case():
            base = torch.arange(3.0)
            assert rpc.rpc_sync("w1", lambda x: x + base, (1,)).tolist() == [1, 2, 3]
            made = rpc.remote("w1", lambda: [base, base])
            assert len(made.to_here()) == 2
            # A class without a name comes back, too.
            kind = type("Nameless", (), {"value": 5})
            assert rpc.rpc_sync("w1", lambda: kind()).value == 5

            # Its traceback names its file, which cloudpickle leaves out.
            mine = {"__name__": "__main__"}
            code = "def blow():\n    return {}['no such key']"
            exec(compile(code, "/home/ada/train.py", "exec"), mine)
            with pytest.raises(KeyError) as caught:
                rpc.rpc_sync("w1", mine["blow"])
            told = "".join(traceback.format_exception(caught.value))
            assert 'File "/home/ada/train.py", line 2, in blow' in told

        workers.on(0, case)
        workers.run(rpc_workers.leave)


def wait_for(to: str, func: Any, args: tuple[Any, ...], timeout: float) -> Any:
    return rpc.rpc_async(to, func, args, timeout=timeout).wait()


@pytest.mark.parametrize("is_connected", [False, True])
@pytest.mark.parametrize("make", [rpc.rpc_sync, wait_for])
def test_the_arguments_of_a_call_that_timed_out_are_freed_without_a_garbage_collection(
    trio, make, is_connected
):
    def case():
        if is_connected:
            rpc.rpc_sync("w1", doze, (0.0, None))
        argument = torch.ones(2)
        kept = weakref.ref(argument)
        gc.disable()
        try:
            try:
                make("w1", doze, (10.0, argument), timeout=0.01 if is_connected else 1e-5)
            except rpc.RpcTimeout:
                del argument
            eventually(lambda: kept() is None, 1.0)
        finally:
            gc.enable()

    trio.on(0, case)


# -- failures that nobody looks at --------------------------------------------------------------


def test_a_failure_that_nobody_waits_for_is_reported_once(trio):
    def case():
        rpc_workers.logged.clear()
        future = rpc.rpc_async("w1", fail, ("value",))
        eventually(future.done)
        gc.disable()
        del future
        eventually(lambda: rpc_workers.logged, 1)
        gc.enable()
        time.sleep(0.05)
        assert len(rpc_workers.logged) == 1
        assert rpc_workers.logged[0].startswith("WARNING a call failed, and its error was never")
        assert "bad\nvalue" in rpc_workers.logged[0]

    trio.on(0, case)


def test_failures_that_somebody_looks_at_are_not_reported(trio):
    def case():
        rpc_workers.logged.clear()

        def swallow(call):
            try:
                call()
            except ValueError:
                pass

        swallow(lambda: rpc.rpc_sync("w1", fail, ("value",)))
        swallow(lambda: rpc.rpc_async("w1", fail, ("value",)).wait())
        future = rpc.rpc_async("w1", fail, ("value",))
        eventually(future.done)
        swallow(future.value)
        chained = rpc.rpc_async("w1", fail, ("value",)).then(lambda done: done.value())
        swallow(chained.wait)
        ok = rpc.rpc_async("w1", double, (1,))
        eventually(ok.done)

        async def main():
            try:
                await rpc.rpc_async("w1", fail, ("value",))
            except ValueError:
                pass

        asyncio.run(main())
        del future, ok, chained
        gc.collect()
        time.sleep(0.1)
        assert rpc_workers.logged == []

    trio.on(0, case)


# -- devices ------------------------------------------------------------------------------------


def test_a_map_of_the_cpu_to_itself_changes_nothing():
    with Workers(2) as workers:
        maps = {"w0": {"w1": {"cpu": "cpu"}}, "w1": {}}

        def come():
            rpc_workers.join(device_maps=maps[f"w{rpc_workers.rank}"])

        workers.run(come)

        def case():
            sent = torch.arange(1000.0)
            back = rpc.rpc_sync("w1", double, (sent,))
            assert back.device.type == "cpu"
            assert torch.equal(back, 2 * sent)

        workers.run(lambda: rpc_workers.rank == 0 and case())


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        ({"nobody": {"cpu": "cpu"}}, "nobody"),
        ({"w1": {"cuda:0": "cpu"}}, "w0"),
    ],
)
def test_a_map_that_cannot_be_stops_every_member_at_init_with_the_same_reason(maps, words):
    with Workers(2) as workers:

        def come():
            before = rpc_workers.resources()["threads"]
            with timed(3), pytest.raises(ValueError) as caught:
                rpc_workers.join(device_maps=maps if rpc_workers.rank == 0 else {})
            assert words in str(caught.value)
            assert not rpc.api._is_current_rpc_agent_set()
            assert rpc_workers.resources()["threads"] == before
            return str(caught.value)

        first, second = workers.run(come)
        assert first == second


def test_a_tensor_without_memory_needs_no_device_map(trio):
    def case():
        x = torch.ones(2, 3, device="meta").t()
        for found in (rpc.rpc_sync("w1", echo, (x,)), rpc.rpc_sync("w1", echo, ([x],))[0]):
            assert (found.device, found.shape, found.stride()) == (x.device, x.shape, x.stride())

    trio.on(0, case)


# -- numbers ------------------------------------------------------------------------------------


def test_statistics_count_what_happened_and_are_plain_data():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def case():
            before = rpc.statistics()
            for i in range(10):
                rpc.rpc_sync("w1", double, (i,))
            with pytest.raises(ValueError):
                rpc.rpc_sync("w1", fail, ("value",))
            pending = rpc.rpc_async("w1", nap, (0.2,))
            kept = rpc.remote("w1", Adder)
            kept.to_here()
            eventually(kept.confirmed_by_owner)
            during = rpc.statistics()
            pending.wait()
            json.dumps(during)
            after = rpc.statistics()
            assert during["calls"]["sent"] - before["calls"]["sent"] == 14
            assert during["calls"]["under_way"] == 1, "the reference is confirmed before"
            assert after["calls"]["under_way"] == 0
            assert during["worker"] == {"name": "w0", "id": 0}
            assert during["rrefs"]["users"] == 1
            (peer,) = (each for each in after["peers"] if each["direction"] == "out")
            assert (peer["name"], peer["id"], peer["transport"]) == ("w1", 1, "uds")
            assert peer["bytes_sent"] > 0
            theirs = rpc.rpc_sync("w1", rpc.statistics)
            json.dumps(theirs)
            assert theirs["calls"]["served"] >= 12
            assert theirs["calls"]["failed"] == 1
            assert theirs["calls"]["being_served"] == 1, "the one that asks"
            assert theirs["calls"]["queue"] == 0
            assert theirs["rrefs"]["owned"] == 1
            assert 0 < theirs["latency_s"]["p50"] <= theirs["latency_s"]["p99"] < 5 * pace()

        workers.on(0, case)
        workers.run(rpc_workers.leave)


def test_everybody_gathers_what_everybody_has(trio):
    def case():
        me = rpc.get_worker_info().name
        for turn in range(3):
            found = rpc.api._all_gather((me, turn), timeout=5)
            assert found == {f"w{i}": (f"w{i}", turn) for i in range(3)}
        rpc.api._barrier(["w0", "w1", "w2"])

    trio.run(case)


def test_a_gathering_that_somebody_does_not_come_to_names_them(trio):
    def case():
        if rpc.get_worker_info().name == "w2":
            return ""
        with timed(2), pytest.raises(RuntimeError) as caught:
            rpc.api._all_gather(1, timeout=0.2)
        return str(caught.value)

    leader, follower, _ = trio.run(case)
    assert leader.startswith("timed out in _all_gather after 0.20 seconds; missing: w2")
    assert follower
    # The numbers of gatherings have to be equal again, so w2 comes to one alone.
    trio.on(2, functools.partial(_gather_alone))
    trio.run(lambda: rpc.api._all_gather(rpc.get_worker_info().name, timeout=5))


def _gather_alone() -> None:
    with pytest.raises(RuntimeError):
        rpc.api._all_gather(1, timeout=0.1)
