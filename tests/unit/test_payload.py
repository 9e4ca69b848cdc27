"""The call in transit: its name, what cannot be pickled, what travels by value. Without workers."""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import resource
import sys
import threading

import cloudpickle
import pytest

from rallypoint._core import limits
from rallypoint.errors import ConfigError, LaunchError
from rallypoint.launch import MultiprocessConfig
from rallypoint.launch.multiprocess_config import LAUNCH_METHODS
from rallypoint.launch.worker import exceptions, payload


FACTS = payload.CallerFacts(
    cfg=MultiprocessConfig(world_size=2), argv=("script.py", "--flag"), log_level=logging.INFO
)


def plain(*args, **kwargs):
    return args, kwargs


class Trainer:
    def __init__(self):
        self.name = "t"
        self.lock = threading.Lock()

    def train(self):
        return self.name


def pack(func, *args, setup=None, **kwargs):
    fd = payload.pack(payload.Call(func, args, kwargs, setup), FACTS)
    size = os.fstat(fd).st_size
    os.close(fd)
    return size


def holds_a_lock():
    lock = threading.Lock()

    def inner():
        return lock

    def outer():
        return inner()

    return outer


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pack(plain, 1, threading.Lock()), "argument 1 of 'plain' (_thread.lock)"),
        (lambda: pack(plain, key={"a": [threading.Lock()]}), "argument 'key' of 'plain', its item"),
        (lambda: pack(plain, setup=holds_a_lock()), "the setup 'holds_a_lock.<locals>.outer'"),
        (
            lambda: pack(holds_a_lock()),
            "the function 'holds_a_lock.<locals>.outer', its variable 'inner', its variable 'lock'",
        ),
        (
            lambda: pack(Trainer().train),
            "the function 'Trainer.train', the object it is bound to, its attribute 'lock'",
        ),
        (lambda: pack(functools.partial(plain, threading.Lock())), "'plain', its item 0"),
        (lambda: pack(plain, (x for x in [])), "argument 0 of 'plain' (generator)"),
    ],
)
def test_what_cannot_be_pickled_is_named_with_the_fix_in_one_line(call, words):
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as caught:
        call()
    text = str(caught.value)
    assert words in text
    assert "launch_method='fork', which needs no pickling" in text
    assert "\n" not in text
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_thing_that_raises_anything_when_pickled_is_named():
    class Stubborn:
        def __reduce__(self):
            raise ZeroDivisionError("I will\nnot go")

    with pytest.raises(ConfigError, match="ZeroDivisionError: I will not go") as caught:
        pack(plain, Stubborn())
    assert "argument 0" in str(caught.value)


def test_a_limit_of_the_system_is_not_taken_for_an_object_that_cannot_be_pickled():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        with pytest.raises(OSError) as caught:
            pack(plain, bytes(2 << 20))
        words = "no file may be larger than 1048576 bytes, also in memory (RLIMIT_FSIZE)"
        assert words in str(limits.explain(caught.value))
        assert words in exceptions.message_of(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_facts_survive_the_way():
    assert payload.CallerFacts.from_json(FACTS.to_json()) == FACTS


def test_every_launch_method_says_whether_it_forks():
    assert set(LAUNCH_METHODS) == {"forkserver", "spawn", "fork"}


@pytest.fixture
def module_from_a_path(tmp_path):
    """A module in sys.modules that the import system does not find, as pytest loads tests."""
    name = "loaded_from_a_path_of_its_own"
    path = tmp_path / f"{name}.py"
    path.write_text("def double(x):\n    return 2 * x\n")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop(name, None)


def test_a_function_of_a_module_that_workers_cannot_import_travels_by_value(
    module_from_a_path, monkeypatch
):
    double = module_from_a_path.double
    by_value = pack(double)
    assert cloudpickle.list_registry_pickle_by_value() == set(), "put back"
    # Once the module can be found, it travels by name, which takes fewer bytes.
    monkeypatch.syspath_prepend(os.path.dirname(module_from_a_path.__file__))
    assert pack(double) < by_value


def test_a_module_that_hides_another_of_its_name_is_not_taken_for_it(
    module_from_a_path, monkeypatch, tmp_path
):
    by_value = pack(module_from_a_path.double)
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{module_from_a_path.__name__}.py").write_text("")
    monkeypatch.syspath_prepend(other)
    assert pack(module_from_a_path.double) == by_value


class _Thresholds:
    """Loaded as those of the garbage collector at that time."""

    def __reduce__(self):
        return gc.get_threshold, ()


def test_nothing_is_collected_while_a_call_and_what_it_imports_are_loaded():
    before = gc.get_threshold()
    packed = cloudpickle.dumps(payload.Call(plain, (_Thresholds(),), {}))
    assert payload._load(memoryview(packed)).args[0][0] == 0
    assert gc.get_threshold() == before


def test_a_result_that_cannot_be_loaded_names_its_rank():
    with pytest.raises(LaunchError, match=r"result of rank 3 cannot be loaded here: .*plain data"):
        payload.unpack_result(3, b"cno_such_module\nthing\n.")


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (plain, "plain"),
        (functools.partial(functools.partial(plain, 1), 2), "plain"),
        (Trainer.train, "Trainer.train"),
        (lambda: None, "<lambda>"),
        (print, "print"),
    ],
)
def test_the_name_a_person_knows_it_by(func, name):
    assert payload.name_of(func) == name
