"""When the garbage collector runs in processes that import what workers need."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rallypoint._core import collector


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
            for _ in range(2):
                runs = 0  # since Python 3.12, a collection that is due begins here
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


def test_names_of_modules_lie_next_to_each_other_and_are_the_same() -> None:
    """In a program of its own: it changes ``sys.modules`` of the whole process."""
    program = """
import email.mime.text, http.server, json, sys, unittest.mock, xml.dom.minidom
from rallypoint._core import collector

class Name(str): pass
sys.modules[Name("odd")] = json
sys.modules["none"] = None
def pages(): return len({id(name) >> 12 for name in sys.modules})
before, order, modules = pages(), list(sys.modules), list(sys.modules.values())
collector.settle()
assert list(sys.modules) == order and all(map(lambda a, b: a is b, sys.modules.values(), modules))
import json.decoder, xml.dom.minidom as again
assert again is sys.modules["xml.dom.minidom"] and type(list(sys.modules)[-2]) is Name
print(before, pages())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after <= before / 3
