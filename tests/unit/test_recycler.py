"""Memory that is lent again: never while anything can still see it, and never more than was agreed."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.wire.recycler import LEAST, Recycler, size_class


SIZE = LEAST


def address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


@given(st.integers(LEAST, 1 << 45))
def test_a_size_class_wastes_at_most_a_fifth(size: int) -> None:
    room = size_class(size)
    assert size <= room
    assert room % 4096 == 0
    assert room - size <= room // 5
    assert size_class(room) == room


def test_a_doubling_has_four_classes() -> None:
    rooms = {size_class(size) for size in range(LEAST + 1, 2 * LEAST + 1, 1000)}
    assert len(rooms) == 4


@pytest.mark.parametrize("size", [0, 1, LEAST - 1, LEAST, LEAST + 1, 3 * LEAST + 5])
def test_memory_is_writable_and_of_the_size_that_was_asked_for(size: int) -> None:
    memory = memoryview(Recycler().allocate(size))
    assert (memory.nbytes, memory.format, memory.readonly) == (size, "B", False)
    memory[:] = b"x" * size
    assert bytes(memory) == b"x" * size


def test_small_memory_is_not_kept() -> None:
    recycler = Recycler()
    for _ in range(3):
        recycler.allocate(LEAST - 1)  # freed at once
    assert recycler.kept == 0


def test_what_is_freed_is_lent_again_for_any_size_of_its_class() -> None:
    recycler = Recycler()
    memory = recycler.allocate(SIZE + 1)
    place = address(memory)
    assert recycler.kept == 0
    del memory
    assert recycler.kept == size_class(SIZE + 1)
    memory = recycler.allocate(SIZE + 1000)
    assert address(memory) == place
    assert recycler.kept == 0
    assert len(memory) == SIZE + 1000


def test_other_classes_do_not_use_it() -> None:
    recycler = Recycler()
    recycler.allocate(SIZE)  # freed at once
    kept = recycler.allocate(2 * SIZE)
    assert recycler.kept == SIZE
    assert len(kept) == 2 * SIZE


@pytest.mark.parametrize(
    "view",
    [
        lambda memory: memory[5:9],
        lambda memory: memory.cast("q")[1:2],
        lambda memory: torch.frombuffer(memory, dtype=torch.float32),
        lambda memory: torch.frombuffer(memory, dtype=torch.float32)[3:4].view(1, 1),
        lambda memory: torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(),
    ],
    ids=["slice", "cast", "tensor", "tensor's view", "storage"],
)
def test_it_is_not_lent_again_before_the_last_view_is_gone(view: object) -> None:
    recycler = Recycler()
    memory = recycler.allocate(SIZE)
    place = address(memory)
    last = view(memory)  # type: ignore[operator]
    del memory
    gc.collect()
    assert recycler.kept == 0
    other = recycler.allocate(SIZE)
    assert address(other) != place
    del last
    assert recycler.kept == SIZE
    assert address(recycler.allocate(SIZE)) == place


def test_a_view_in_a_cycle_comes_back_with_the_collection() -> None:
    recycler = Recycler()
    cycle: list[object] = [recycler.allocate(SIZE)]
    cycle.append(cycle)
    del cycle
    assert recycler.kept == 0
    gc.collect()
    assert recycler.kept == SIZE


def test_no_more_is_kept_than_agreed() -> None:
    recycler = Recycler(keep=2 * SIZE)
    lent = [recycler.allocate(SIZE) for _ in range(4)]
    lent.append(recycler.allocate(4 * SIZE))
    while lent:
        lent.pop()
        assert recycler.kept <= 2 * SIZE
    assert recycler.kept == 2 * SIZE


def test_what_is_given_up_comes_back_from_what_is_still_lent() -> None:
    recycler = Recycler()
    lent = recycler.allocate(SIZE)
    recycler.allocate(SIZE)  # freed at once
    recycler.clear()
    assert recycler.kept == 0
    lent[:4] = b"mine"
    assert bytes(lent[:4]) == b"mine"
    del lent
    assert recycler.kept == SIZE


def test_memory_outlives_its_recycler() -> None:
    memory = Recycler().allocate(SIZE)
    gc.collect()
    memory[:] = b"x" * SIZE
    assert memory[SIZE - 1] == ord("x")


def test_who_frees_while_the_lock_is_held_does_not_wait_for_it() -> None:
    # A collection can run anywhere, even in the middle of ``allocate``.
    recycler = Recycler()
    memory = recycler.allocate(SIZE)
    with recycler._lock:
        del memory
    assert recycler.kept == 0


def test_threads_never_get_the_same_memory_twice() -> None:
    recycler = Recycler(keep=8 * SIZE)
    places: set[int] = set()
    lock = threading.Lock()

    def use(seed: int) -> int:
        chance = random.Random(seed)
        mine: list[tuple[memoryview, int]] = []
        for _ in range(300):
            if len(mine) < 4 and chance.random() < 0.6:
                memory = recycler.allocate(SIZE - chance.randrange(2))
                if len(memory) < LEAST:
                    continue
                place = address(memory)
                with lock:
                    assert place not in places
                    places.add(place)
                memory[:8] = seed.to_bytes(8, "little")
                mine.append((memory, place))
            elif mine:
                memory, place = mine.pop(chance.randrange(len(mine)))
                assert int.from_bytes(memory[:8], "little") == seed
                with lock:
                    places.discard(place)
                del memory
        with lock:
            places.difference_update(place for _, place in mine)
        return len(mine)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(8)))
    gc.collect()
    assert recycler.kept <= 8 * SIZE
    assert recycler.kept == sum(room * len(free) for room, free in recycler._free.items()), (
        "what is counted is what is there"
    )
