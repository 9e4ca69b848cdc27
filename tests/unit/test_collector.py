"""When the garbage collector runs in processes that import what workers need."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rallypoint.launch.server import collector


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()
    yield
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()


def test_nothing_is_collected_while_it_is_paused() -> None:
    gc.set_threshold(10, 5, 5)
    runs = 0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal runs
        runs += phase == "start"

    gc.callbacks.append(note)
    try:
        with collector.paused():
            assert gc.isenabled(), "a module may look"
            kept: list[list[int]] = [[] for _ in range(1000)]
            assert runs == 0
        kept += [[] for _ in range(1000)]
        assert runs > 0, "and then again"
    finally:
        gc.callbacks.remove(note)
    assert gc.get_threshold() == (10, 5, 5)


def test_a_module_that_sets_its_own_thresholds_has_its_way() -> None:
    with collector.paused():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def test_a_module_that_turns_it_off_has_its_way() -> None:
    with collector.paused():
        gc.disable()
    assert not gc.isenabled()


def test_thresholds_are_put_back_behind_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(ImportError), collector.paused():
        raise ImportError
    assert gc.get_threshold() == before


def test_what_is_kept_is_never_visited() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    collector.keep()
    assert not any(each is cycle for each in gc.get_objects())


def test_what_is_settled_has_no_garbage() -> None:
    ends = []

    class Node:
        def __del__(self) -> None:
            ends.append("freed")

    node = Node()
    node.me = node  # type: ignore[attr-defined]
    del node
    collector.settle()
    assert ends == ["freed"] and gc.get_freeze_count() > 0
