"""Streams: items in order and no faster than they are taken; ended from either side, midway, or by a death."""

import asyncio
import contextvars
import functools
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch

import rpc_workers
from pace import pace
from rallypoint import rpc
from rallypoint.errors import PeerLost
from rallypoint.rpc.stream import ItemChannel
from rpc_workers import Workers, eventually, timed


pytestmark = pytest.mark.integration

happened: list[Any] = []


@pytest.fixture
def pair() -> Iterator[Workers]:
    """w0, w1, with two threads each; in the end nothing is left."""
    with Workers(2) as workers:
        before = workers.run(rpc_workers.resources)
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=2))
        yield workers
        workers.run(rpc_workers.leave)
        assert workers.run(rpc_workers.resources) == before


def seen() -> list[Any]:
    return list(happened)


def double(x: Any) -> Any:
    return 2 * x


def count(to: int, fail_at: int = -1) -> Iterator[int]:
    """Notes how far it has come, and that it was closed."""
    try:
        for i in range(to):
            if i == fail_at:
                raise ValueError(f"bad {i}")
            happened.append(i)
            yield i
    finally:
        happened.append("closed")


async def count_later(to: int) -> AsyncIterator[int]:
    try:
        for i in range(to):
            await asyncio.sleep(0.001)
            yield i
    finally:
        happened.append("closed")


def spoiled() -> Iterator[int]:
    try:
        yield from range(1000)
    finally:
        raise ValueError("the file cannot be closed")


async def spoiled_later() -> AsyncIterator[int]:
    try:
        for i in range(1000):
            yield i
    finally:
        await asyncio.sleep(0)
        raise ValueError("the file cannot be closed")


async def waits_later(seconds: float) -> AsyncIterator[float]:
    """Its cleanup takes a moment, and is complete only then."""
    try:
        yield 0.0
        await asyncio.sleep(seconds)
        yield seconds
    finally:
        await asyncio.sleep(0.05)
        happened.append("closed")


async def tidies_up(seconds: float) -> AsyncIterator[float]:
    try:
        yield 0.0
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(seconds)
        happened.append("tidy")


async def tidies_up_once(seconds: float) -> None:
    happened.append("begun")
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(seconds)
        happened.append("tidy")


async def next_of_queue() -> AsyncIterator[int]:
    while True:
        yield await queue().get()


@functools.cache
def queue() -> asyncio.Queue[int]:
    return asyncio.Queue()


async def put(item: int) -> None:
    await queue().put(item)


variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


async def with_a_variable(to: int) -> AsyncIterator[int]:
    token = variable.set(5)
    try:
        for _ in range(to):
            yield variable.get()
    finally:
        variable.reset(token)


async def with_a_limit(at: int, pause: float) -> AsyncIterator[int]:
    """Its limit starts at item ``at``, whenever that is, and it notes when the limit has passed."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        for i in range(30):
            if i == at:
                limit.reschedule(loop.time() + 0.2)
                loop.call_at(loop.time() + 0.3, happened.append, "too late")
                await asyncio.sleep(pause)
            yield i


def slowly(seconds: float) -> Iterator[int]:
    for i in range(1000):
        time.sleep(seconds)
        yield i


def tensors(number: int, size: int) -> Iterator[torch.Tensor]:
    for i in range(number):
        yield torch.full((size,), i)


def strange() -> Iterator[Any]:
    yield 1
    yield threading.Lock()


def rows() -> list[int]:
    return [3, 2, 1]


def no_generator() -> int:
    return 5


def sum_of_stream(to: str, number: int) -> int:
    return sum(rpc.rpc_stream(to, count, (number,)))


gate = threading.Event()


def waits_for_item() -> Iterator[float]:
    yield 0.0
    gate.wait(30)
    yield 1.0


def open_gate() -> None:
    gate.set()


def test_items_come_in_order_and_all_of_them(pair):
    def case():
        assert list(rpc.rpc_stream("w1", count, (500,))) == list(range(500))
        assert list(rpc.rpc_stream("w1", count_later, (40,))) == list(range(40))
        assert list(rpc.rpc_stream("w1", count, kwargs={"to": 3})) == [0, 1, 2]
        assert list(rpc.rpc_stream("w0", count, (40,))) == list(range(40)), "to oneself"
        assert list(rpc.rpc_stream("w1", count, (0,))) == []
        assert list(rpc.rpc_stream("w1", rows)) == [3, 2, 1]
        with pytest.raises(TypeError):
            list(rpc.rpc_stream("w1", no_generator))

    pair.on(0, case)


def test_a_stream_is_iterated_in_asyncio_too(pair):
    def case():
        async def one(number):
            return [each async for each in rpc.rpc_stream("w1", count, (number,))]

        async def main():
            return await asyncio.gather(*(one(number) for number in (30, 40, 50)))

        assert asyncio.run(main()) == [list(range(n)) for n in (30, 40, 50)]

    pair.on(0, case)


@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("source", [count, count_later])
def test_several_threads_and_tasks_share_the_items_of_one_stream_and_all_hear_its_end(
    pair, source, window
):
    def case():
        stream = rpc.rpc_stream("w1", source, (200,), window=window)

        async def take_later() -> list[int]:
            return [each async for each in stream]

        async def take_in_tasks() -> list[int]:
            return list(chain(*await asyncio.gather(*(take_later() for _ in range(3)))))

        with ThreadPoolExecutor(4) as threads:
            taking = [threads.submit(list, stream) for _ in range(3)]
            taking.append(threads.submit(lambda: asyncio.run(take_in_tasks())))
            # The stream's own limit is a minute: whoever does not hear of the end waits until then.
            return sorted(chain(*(each.result(20 * pace()) for each in taking)))

    assert pair.on(0, case) == list(range(200))


def test_all_threads_and_tasks_that_share_a_stream_see_its_error(pair):
    def case():
        stream = rpc.rpc_stream("w1", count, (100, 50), window=4)
        errors: list[str] = []

        def take() -> list[int]:
            found = []
            try:
                for each in stream:
                    found.append(each)  # noqa: PERF402  # those before the error are wanted
            except ValueError as error:
                errors.append(str(error))
            return found

        async def take_later() -> list[int]:
            found = []
            try:
                async for each in stream:
                    found.append(each)  # noqa: PERF401  # the same
            except ValueError as error:
                errors.append(str(error))
            return found

        async def take_in_tasks() -> list[int]:
            return list(chain(*await asyncio.gather(*(take_later() for _ in range(3)))))

        with ThreadPoolExecutor(4) as threads:
            taking = [threads.submit(take) for _ in range(3)]
            taking.append(threads.submit(lambda: asyncio.run(take_in_tasks())))
            taken = sorted(chain(*(each.result(20 * pace()) for each in taking)))
        # Each pool thread read only once, and whoever comes now is told, too.
        assert take() == []
        assert take() == []
        return taken, errors

    taken, errors = pair.on(0, case)
    assert taken == list(range(50))
    assert errors == ["bad 50"] * 7


def test_who_waits_for_an_item_hears_that_another_one_has_closed_the_stream(pair):
    def case():
        stream = rpc.rpc_stream("w1", waits_for_item)
        assert next(stream) == 0.0

        async def take_later() -> list[float]:
            return [each async for each in stream]

        with ThreadPoolExecutor(3) as threads:
            waiting = [threads.submit(list, stream), threads.submit(list, stream)]
            waiting.append(threads.submit(lambda: asyncio.run(take_later())))
            time.sleep(0.2)
            stream.close()
            return [each.result(10 * pace()) for each in waiting]

    assert pair.on(0, case) == [[], [], []]
    pair.on(1, open_gate)


@pytest.mark.parametrize("window", [1, 5, 16])
def test_the_generator_is_never_further_ahead_than_its_window(pair, window):
    def case():
        stream = rpc.rpc_stream("w1", count, (1000,), window=window)
        time.sleep(0.1)
        for taken in range(60):
            made = len(rpc.rpc_sync("w1", seen))
            # One more is made and waits for its turn.
            assert made <= taken + window + 1, (taken, made)
            assert next(stream) == taken
        stream.close()

    pair.on(0, case)


def test_a_stream_that_is_left_early_closes_the_generator(pair):
    def case():
        def closed():
            return rpc.rpc_sync("w1", seen).count("closed")

        with rpc.rpc_stream("w1", count, (1000,)) as stream:
            assert next(stream) == 0
        eventually(lambda: closed() == 1)
        assert list(stream) == []
        stream = rpc.rpc_stream("w1", count, (1000,))
        next(stream)
        stream.close()
        stream.close()
        eventually(lambda: closed() == 2)
        for _ in rpc.rpc_stream("w1", count, (1000,)):
            break
        gc.collect()
        eventually(lambda: closed() == 3)
        stream = rpc.rpc_stream("w1", count_later, (1000,))
        next(stream)
        del stream
        gc.collect()
        eventually(lambda: closed() == 4)
        assert rpc.statistics()["calls"]["under_way"] == 0

    pair.on(0, case)


def test_streams_that_have_ended_are_freed_without_a_garbage_collection(pair):
    def case():
        def num_channels():
            return sum(isinstance(each, ItemChannel) for each in gc.get_objects())

        gc.collect()
        gc.disable()
        try:
            assert list(rpc.rpc_stream("w1", count, (3,))) == [0, 1, 2]
            next(rpc.rpc_stream("w1", count, (100,)))
            try:
                list(rpc.rpc_stream("w1", waits_later, (10.0,), timeout=0.1))
            except rpc.RpcTimeout:
                pass
            eventually(lambda: num_channels() == 0, 1.0)
        finally:
            gc.enable()

    pair.on(0, case)


@pytest.mark.parametrize("source", [spoiled, spoiled_later])
def test_an_error_in_the_cleanup_after_the_caller_has_left_is_logged_where_it_was_raised(
    pair, source
):
    def leave_early():
        with rpc.rpc_stream("w1", source) as stream:
            assert next(stream) == 0

    def told():
        return [each for each in rpc_workers.logged if each.startswith(("WARNING", "ERROR"))]

    pair.on(0, leave_early)
    pair.on(1, lambda: eventually(told))
    (line,) = pair.on(1, told)
    assert f"{source.__name__} failed while it was closed; its caller, 'w0', has left" in line
    assert pair.on(0, told) == []
    assert pair.on(0, lambda: rpc.rpc_sync("w1", double, (2,))) == 4


def test_an_error_comes_after_the_items_before_it_and_once(pair):
    def case():
        for number in (0, 1, 20):
            stream = rpc.rpc_stream("w1", count, (100, number))
            found = []
            with pytest.raises(ValueError, match=f"bad {number}") as caught:
                for each in stream:
                    found.append(each)  # noqa: PERF402  # those before the error are wanted
            assert found == list(range(number))
            assert "in count" in str(caught.value.__cause__)
            assert list(stream) == []

    pair.on(0, case)


def test_an_item_that_cannot_be_pickled_ends_the_stream_with_the_reason(pair):
    def case():
        stream = rpc.rpc_stream("w1", strange)
        assert next(stream) == 1
        with pytest.raises(TypeError, match="pickle"):
            next(stream)
        assert rpc.rpc_sync("w1", double, (2,)) == 4

    pair.on(0, case)


def test_a_stream_has_one_deadline_for_all_of_it(pair):
    def case():
        stream = rpc.rpc_stream("w1", slowly, (0.02,), timeout=0.2)
        with (
            timed(0.6, 0.1),
            pytest.raises(rpc.RpcTimeout, match="RPC ran for more than") as caught,
        ):
            for _ in stream:
                pass
        assert "slowly" in str(caught.value)

        async def main():
            async for _ in rpc.rpc_stream("w1", slowly, (0.02,), timeout=0.2):
                pass

        with timed(0.6, 0.1), pytest.raises(rpc.RpcTimeout):
            asyncio.run(main())

    pair.on(0, case)


def test_tensors_of_any_size_are_items(pair):
    def case():
        for size in (1, 1000, 200_000):
            found = list(rpc.rpc_stream("w1", tensors, (30, size)))
            assert [int(each.unique()) for each in found] == list(range(30))

    pair.on(0, case)


def test_streams_that_nobody_reads_keep_no_thread_from_working(pair):
    """The callee has two threads, and many more generators that wait for their callers."""

    def case():
        streams = [rpc.rpc_stream("w1", count, (100,), window=4) for _ in range(10)]
        time.sleep(0.1)
        with timed(1):
            assert [rpc.rpc_sync("w1", double, (i,)) for i in range(20)] == list(range(0, 40, 2))
        assert [next(each) for each in streams] == [0] * 10
        assert [sum(each) for each in streams] == [sum(range(100))] * 10

    pair.on(0, case)


@pytest.mark.parametrize("kind", ["stream", "call"])
def test_what_is_cancelled_before_its_deadline_has_the_time_to_clean_up(pair, kind):
    """The deadline passes while it cleans up."""

    def case():
        limit = pace()
        if kind == "stream":
            stream = rpc.rpc_stream("w1", tidies_up, (2 * limit,), timeout=limit)
            assert next(stream) == 0.0
            stream.close()
        else:
            future = rpc.rpc_async("w1", tidies_up_once, (2 * limit,), timeout=limit)
            eventually(lambda: rpc.rpc_sync("w1", seen) == ["begun"], 5)
            assert future.cancel()
        eventually(lambda: "tidy" in rpc.rpc_sync("w1", seen), 5)

    pair.on(0, case)


def test_asynchronous_generators_that_wait_take_no_threads_and_end_with_their_stream(pair):
    """The callee has two threads."""

    def case():
        streams = [rpc.rpc_stream("w1", waits_later, (3600,), timeout=0) for _ in range(20)]
        assert [next(each) for each in streams] == [0.0] * 20
        with timed(5 * pace()):
            assert rpc.rpc_sync("w1", double, (2,), timeout=4 * pace()) == 4
        for each in streams:
            each.close()
        eventually(lambda: rpc.rpc_sync("w1", seen) == ["closed"] * 20, 10 * pace())
        # Also at its deadline.
        stream = rpc.rpc_stream("w1", waits_later, (3600,), timeout=0.5 * pace())
        assert next(stream) == 0.0  # a call that arrives after its deadline would not start
        with pytest.raises(rpc.RpcTimeout):
            next(stream)
        eventually(lambda: len(rpc.rpc_sync("w1", seen)) == 21, 10 * pace())

    pair.on(0, case)


def test_the_cleanup_of_an_asynchronous_generator_is_complete_before_its_worker_has_left():
    def begin():
        rpc_workers.held["stream"] = rpc.rpc_stream("w1", waits_later, (3600,), timeout=0)
        assert next(rpc_workers.held["stream"]) == 0.0

    def leave():
        with timed(4 * pace()):
            rpc.shutdown(graceful=False)
        return seen()

    with Workers(2) as workers:
        workers.run(rpc_workers.join)
        workers.on(0, begin)
        assert workers.on(1, leave) == ["closed"]


def test_asynchronous_generators_and_coroutines_share_one_loop(pair):
    def case():
        with rpc.rpc_stream("w1", next_of_queue, timeout=20 * pace()) as stream:
            for i in range(3):
                waiting = threading.Timer(0.05, rpc.rpc_sync, ("w1", put, (i,)))
                waiting.start()
                assert next(stream) == i
                waiting.join()

    pair.on(0, case)


def test_an_asynchronous_generator_is_one_task(pair):
    def case():
        # More than the window: some items wait for credit.
        assert list(rpc.rpc_stream("w1", with_a_variable, (40,))) == [5] * 40
        found = []
        with pytest.raises(TimeoutError):
            for each in rpc.rpc_stream("w1", with_a_limit, (1, 60.0)):
                found.append(each)  # noqa: PERF402  # those before the error are wanted
        assert found == [0]
        # The limit passes while the generator waits for its caller.
        eventually(lambda: rpc.rpc_sync("w1", seen).count("too late") == 1)
        stream = rpc.rpc_stream("w1", with_a_limit, (2, 0.0), window=2)
        eventually(lambda: rpc.rpc_sync("w1", seen).count("too late") == 2)
        with pytest.raises(TimeoutError):
            for each in stream:
                found.append(each)  # noqa: PERF402
        assert found == [0, 0, 1, 2]

    pair.on(0, case)


def test_a_served_function_may_read_a_stream(pair):
    def case():
        futures = [rpc.rpc_async("w1", sum_of_stream, ("w0", 100)) for _ in range(6)]
        assert [each.wait() for each in futures] == [sum(range(100))] * 6

    pair.run(case)


def test_a_stream_whose_source_dies_ends_at_once():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def begin():
            rpc_workers.held["stream"] = rpc.rpc_stream("w1", waits_for_item)
            assert next(rpc_workers.held["stream"]) == 0.0

        def wait():
            with timed(2), pytest.raises(PeerLost):
                next(rpc_workers.held["stream"])

        workers.on(0, begin)
        waiting = workers.begin(0, wait)
        time.sleep(0.1)
        workers.kill(1)
        waiting.result()


def test_a_generator_whose_caller_dies_is_closed():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def begin():
            rpc_workers.held["stream"] = rpc.rpc_stream("w1", count, (1000,))
            assert next(rpc_workers.held["stream"]) == 0

        workers.on(0, begin)
        workers.kill(0)

        def look():
            eventually(lambda: "closed" in seen())
            assert len(seen()) < 40

        workers.on(1, look)
