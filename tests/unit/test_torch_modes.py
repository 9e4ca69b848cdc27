"""Each coroutine of a thread has torch's modes to itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.rpc.agent.torch_modes import CoroutineWithModes, task_factory


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "cpu autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another autocast": lambda: torch.autocast("cpu", torch.float16),
    "enabled in inference": lambda: _both(torch.inference_mode(), torch.enable_grad()),
    "usual": lambda: torch.inference_mode(False),
}


@contextlib.contextmanager
def _both(*blocks: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in blocks:
            stack.enter_context(each)
        yield


def now() -> tuple[Any, ...]:
    casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts


USUAL = (True, False, (False, torch.bfloat16))


def inside(*names: str) -> tuple[Any, ...]:
    with _both(*(MODES[each]() for each in names)):
        return now()


def run(*coroutines: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run them concurrently, in a loop that ends with its usual modes."""

    async def main() -> list[Any]:
        asyncio.get_running_loop().set_task_factory(task_factory)
        found = await asyncio.gather(*(each() for each in coroutines))
        assert now() == USUAL
        return found

    with asyncio.Runner() as runner:
        return runner.run(main())


async def walk(names: list[str], turns: Iterator[int]) -> None:
    """Enter one mode after another, waiting in each, and leave them again."""
    with contextlib.ExitStack() as stack:
        for depth in range(len(names) + 1):
            expected = now() if depth else USUAL
            for _ in range(next(turns)):
                await asyncio.sleep(0)
                assert now() == expected
            if depth < len(names):
                stack.enter_context(MODES[names[depth]]())
    assert now() == USUAL
    await asyncio.sleep(0)
    assert now() == USUAL


@given(
    st.lists(st.lists(st.sampled_from(sorted(MODES)), max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1),
)
def test_each_finds_its_own_modes_again_in_whatever_order_they_wait(
    paths: list[list[str]], turns: list[int]
) -> None:
    endless = itertools.cycle(turns)
    run(*(lambda path=path: walk(path, endless) for path in paths))  # type: ignore[misc]


@pytest.mark.parametrize("name", MODES)
def test_tasks_that_are_made_in_a_mode_begin_in_it(name: str) -> None:
    async def child() -> tuple[Any, Any]:
        first = now()
        await asyncio.sleep(0)
        return first, now()

    async def parent() -> Any:
        with MODES[name]():
            tasks = [asyncio.create_task(child()) for _ in range(2)]
            made = now()
        return made, await asyncio.gather(*tasks)

    ((made, found),) = run(parent)
    assert made == inside(name)
    assert found == [(made, made)] * 2


class Sleeper:
    """Neither a coroutine nor a future, like the result of a call."""

    def __await__(self) -> Any:
        yield from asyncio.sleep(0, "slept").__await__()
        return now()


def test_other_awaitable_objects_become_tasks_as_well() -> None:
    async def waits() -> Any:
        with torch.no_grad():
            return await asyncio.gather(Sleeper(), Sleeper())

    async def awaits_a_wrapped_one() -> Any:
        async def inner() -> Any:
            with torch.no_grad():
                await asyncio.sleep(0)
                return now()

        found = await CoroutineWithModes(inner())
        return found, now()

    found, (within, after) = run(waits, awaits_a_wrapped_one)
    assert found == [inside("no_grad")] * 2
    assert (within, after) == (inside("no_grad"), USUAL)


def test_a_mode_that_is_set_for_good_ends_with_the_coroutine() -> None:
    seen = []

    async def sets() -> None:
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)  # type: ignore[no-untyped-call]
        await asyncio.sleep(0)
        seen.append(now())

    async def other() -> None:
        for _ in range(4):
            assert now() == USUAL
            await asyncio.sleep(0)

    run(sets, other)
    assert [each[:2] for each in seen] == [(False, False)]
    assert seen[0][2] == (True, torch.bfloat16)


@pytest.mark.parametrize("how", ["raises", "is cancelled", "is never awaited again"])
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("outside", MODES)
def test_one_that_ends_early_leaves_no_mode_behind(how: str, name: str, outside: str) -> None:
    async def ends(wait: Callable[[], Awaitable[None]]) -> None:
        with MODES[name]():
            await wait()
            raise ValueError

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(ends(lambda: asyncio.sleep(0)))
        await asyncio.sleep(0)
        if how == "is cancelled":
            task.cancel()
        with pytest.raises((ValueError, asyncio.CancelledError)):
            await task

    if how != "is never awaited again":
        run(main)
        return

    class Never:
        def __await__(self) -> Any:
            yield

    async def never() -> None:
        await Never()

    left: Any = CoroutineWithModes(ends(never))
    left.send(None)
    assert now() == USUAL
    with MODES[outside]():
        expected = now()
        del left
        gc.collect()
        assert now() == expected
    assert now() == USUAL
