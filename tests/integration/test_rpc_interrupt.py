"""Ctrl-C is felt in whatever waits; asyncio's cancellation is quiet; pooled memory goes back on its own."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rpc_workers
from pace import pace
from rallypoint import rpc
from rallypoint.rpc.connections import unused_memory
from rpc_workers import Workers, eventually


pytestmark = pytest.mark.integration

# Seconds that each wait would take, and within which Ctrl-C is felt.
LONG = 30.0
FELT = 0.5
# For what cannot be tried again: a busy machine may stand still for a moment.
FELT_ONCE = LONG / 3


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def slowly() -> Iterator[int]:
    time.sleep(LONG)
    yield 1


def interrupted_after(act: Callable[[], Any]) -> float:
    """Press Ctrl-C a moment after ``act`` has started. Returns the seconds until it is felt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.3, press)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            act()
        return time.monotonic() - pressed[0]
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def felt_after(act: Callable[[], Any]) -> float:
    seconds = interrupted_after(act)
    return seconds if seconds <= FELT * pace() else min(seconds, interrupted_after(act))


def wait_for_block() -> None:
    with rpc.api._wait_all():
        rpc.rpc_async("w1", nap, (LONG,))


def interrupt_in_block() -> None:
    with rpc.api._wait_all():
        rpc.rpc_async("w1", nap, (LONG,))
        time.sleep(LONG)


def slow_ones() -> dict[str, float]:
    """What did not feel Ctrl-C in time."""
    future = rpc.rpc_async("w1", nap, (LONG,))
    following = future.then(lambda done: done.value())
    theirs = rpc.remote("w1", nap, (LONG,))
    own = rpc.remote("w0", nap, (LONG,))
    waits: dict[str, Callable[[], Any]] = {
        "rpc_sync": lambda: rpc.rpc_sync("w1", nap, (LONG,)),
        "wait": future.wait,
        "wait of then": following.wait,
        "wait_all": lambda: rpc.api.wait_all([future, theirs._get_future()]),
        "_wait_all": wait_for_block,
        "in the block of _wait_all": interrupt_in_block,
        "to_here": theirs.to_here,
        "to_here of its own": own.to_here,
        "local_value": own.local_value,
        "method": lambda: theirs.rpc_sync().hex(),
        "next": lambda: next(rpc.rpc_stream("w1", slowly)),
        "wait_for": lambda: rpc.wait_for("nobody", LONG),
        "_all_gather": lambda: rpc.api._all_gather(1, timeout=LONG),
    }
    took = {name: felt_after(act) for name, act in waits.items()}
    # With calls under way; and it has left afterwards.
    assert interrupted_after(lambda: rpc.shutdown(timeout=LONG)) < FELT_ONCE
    assert not rpc.api._is_current_rpc_agent_set()
    return {name: seconds for name, seconds in took.items() if seconds > FELT * pace()}


def test_ctrl_c_is_felt_in_all_that_waits():
    with Workers(2) as workers:
        workers.run(rpc_workers.join_dynamic)
        assert workers.on(0, slow_ones, limit=4 * LONG) == {}
        workers.on(1, lambda: rpc.shutdown(graceful=False))


def test_ctrl_c_is_felt_by_who_waits_for_members():
    with Workers(2) as workers:

        def join_alone() -> None:
            rpc_workers.join(rpc_timeout=LONG)

        assert workers.on(0, interrupted_after, join_alone, limit=2 * LONG) < FELT_ONCE


async def give_up_and_end() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rpc.rpc_async("w1", nap, (0.3,)), 0.05)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(rpc.rpc_stream("w1", slowly)), 0.05)

    async def wait() -> None:
        await rpc.rpc_async("w1", nap, (0.3,))

    # The loop ends while this call is under way.
    kept.append(asyncio.ensure_future(wait()))
    await asyncio.sleep(0)


kept: list[Any] = []


def test_what_asyncio_gives_up_is_quiet():
    with Workers(2) as workers:
        workers.run(rpc_workers.join_dynamic)
        workers.on(0, lambda: asyncio.run(give_up_and_end()))
        # Wait until the cancelled calls are completed.
        workers.on(0, lambda: eventually(lambda: not rpc.statistics()["calls"]["under_way"]))
        workers.on(0, lambda: rpc.rpc_sync("w1", nap, (0.5,)))
        assert "error" not in workers.output(0).lower()
        workers.run(lambda: rpc.shutdown(graceful=False))


def echo_sum(x: torch.Tensor) -> float:
    return float(x.sum())


def test_pooled_memory_goes_back_in_an_idle_process():
    with Workers(2) as workers:

        def join_hastily() -> None:
            unused_memory.KEPT, unused_memory.LOOK = 0.3, 0.1
            rpc_workers.join_dynamic()

        def shared() -> int:
            return sum(each.get("shared_bytes", 0) for each in rpc.statistics()["peers"])

        def use_it() -> None:
            x = torch.ones(1 << 21)
            assert rpc.rpc_sync("w1", echo_sum, (x,)) == x.numel()
            assert shared() >= x.nbytes

        workers.run(join_hastily)
        for _ in range(2):
            workers.on(0, use_it)
            workers.on(0, lambda: eventually(lambda: not shared(), 15))
        workers.run(rpc.shutdown)
