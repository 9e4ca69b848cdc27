"""A compromised member calls everything there is, through every door; the worker with a list runs none of it.

``w1`` keeps the list; ``w0`` is the member. What is tried is found by walking ``dir()``, so methods of later versions of torch
are tried, too. ``w1`` hears from an audit hook what Python opens, loads and starts in a folder, which stays empty.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import rpc_workers
from rallypoint import rpc
from rpc_workers import Workers


pytestmark = [pytest.mark.integration]

# All of these may be called, except for what reaches beyond them.
LISTED = [
    "torch.Tensor",
    "torch.nn.Parameter",
    "torch.storage",
    "numpy.ndarray",
    f"{__name__}.make",
]
heard: list[str] = []
CHECKED = ("open", "os.", "subprocess.", "ctypes.dlopen", "shutil.", "socket.", "import", "exec")


def listen(folder: str) -> None:
    """On w1."""

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(CHECKED) and any(folder in str(each) for each in args):
            heard.append(f"{event} {args}")

    sys.addaudithook(hear)


def make(what: str) -> Any:
    match what:
        case "tensor":
            return torch.ones(2, 2)
        case "storage":
            return torch.ones(2).untyped_storage()
        case "array":
            return np.ones(2)
        case "future":
            return None
    raise ValueError(what)


def canary(*args: Any, **kwargs: Any) -> None:
    heard.append(f"called with {args} {kwargs}")


@pytest.fixture(params=["listed", "exported_only"])
def besieged(request: pytest.FixtureRequest) -> Iterator[Workers]:
    mode: dict[str, Any] = {"allowed_modules": LISTED}
    if request.param == "exported_only":
        mode = {"exported_only": True, "allowed_calls": LISTED}
    with Workers(2) as workers:
        pending = workers.begin(0, rpc_workers.join)
        workers.on(1, functools.partial(rpc_workers.join, **mode))
        pending.result(20)
        yield workers
        workers.run(rpc_workers.leave)


def test_no_method_of_a_value_over_there_writes_or_reads_or_calls(besieged, tmp_path):
    folder = tmp_path / "canary"
    folder.mkdir()
    (folder / "there").write_text("what nobody may read")

    def attack(path: str) -> tuple[int, list[str]]:
        tried, got_in = 0, []
        there, new = os.path.join(path, "there"), os.path.join(path, "new")
        arguments = [(new,), (there, False, 8), (canary,)]
        for what in ("tensor", "storage", "array"):
            names = {each for each in dir(make(what)) if not each.startswith("__")}
            for name in sorted(names):
                rref = rpc.remote("w1", make, (what,))
                for args in arguments:
                    tried += 1
                    try:
                        value = rref.rpc_sync(timeout=10)._invoke(name, args, {})
                    except BaseException as error:  # whatever it says
                        if isinstance(error, (rpc.RpcTimeout, rpc.PeerLost)):
                            got_in.append(f"{what}.{name}{args}: {error}")
                        continue
                    if "nobody may read" in str(value):
                        got_in.append(f"{what}.{name}{args}")
        return tried, got_in

    besieged.on(1, listen, str(folder))
    tried, got_in = besieged.on(0, attack, str(folder), limit=120)
    assert tried > 1500
    assert got_in == []
    assert besieged.on(1, lambda: heard) == []
    assert [each.name for each in folder.iterdir()] == ["there"]


def of_the_package() -> list[Any]:
    """Functions, classes and methods of rallypoint.rpc and of what it stands on, the private ones too."""
    found: dict[str, Any] = {}
    for package in ("rallypoint.rpc", "rallypoint.wire", "rallypoint._core"):
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            module = importlib.import_module(info.name)
            for thing in vars(module).values():
                if not isinstance(thing, (type, types.FunctionType)):
                    continue
                if not thing.__module__.startswith("rallypoint"):
                    continue
                found[f"{thing.__module__}.{thing.__qualname__}"] = thing
                if isinstance(thing, type):
                    for each in vars(thing).values():
                        inner = inspect.unwrap(getattr(each, "__func__", each))
                        if isinstance(inner, types.FunctionType):
                            found[f"{inner.__module__}.{inner.__qualname__}"] = inner
    # Those by which a gathering goes on are among them; with other arguments they fail.
    return [found[each] for each in sorted(found)]


DOORS = ("sync", "async", "remote", "stream")


def call(door: str, func: Any, args: tuple[Any, ...]) -> Any:
    match door:
        case "sync":
            return rpc.rpc_sync("w1", func, args, timeout=10)
        case "async":
            return rpc.rpc_async("w1", func, args, timeout=10).wait()
        case "remote":
            return rpc.remote("w1", func, args, timeout=10).to_here(10)
        case _:
            return list(rpc.rpc_stream("w1", func, args))


def call_everything(path: str) -> tuple[int, list[str]]:
    warnings.simplefilter("ignore")
    functions = of_the_package()
    functions += [os.mkdir, open, eval, exec, print, torch.load, torch.save, torch.from_file]
    functions += [np.save, np.fromfile, torch.ops.load_library, torch.jit.load, canary]
    functions += [functools.partial(canary, 1), torch.Tensor, torch.UntypedStorage, np.ndarray]
    functions += [torch.ones(1).numpy, np.ones(1).tofile, torch.Tensor.apply_, rpc.RRef]
    tried, ran = 0, []
    for number, func in enumerate(functions):
        # Each through one door, and the one after it through the next.
        for door in DOORS[number % len(DOORS) :][:1]:
            tried += 1
            try:
                value = call(door, func, (os.path.join(path, "new"),))
            except BaseException as error:  # whatever it says
                if isinstance(error, (rpc.RpcTimeout, rpc.PeerLost)):
                    ran.append(f"{func} by {door}: {error}")
                continue
            ran.append(f"{func} by {door}: {value!r}")
    return tried, ran


def test_no_function_of_our_own_or_of_torch_or_python_is_called(besieged, tmp_path):
    folder = tmp_path / "canary"
    folder.mkdir()

    besieged.on(1, listen, str(folder))
    tried, ran = besieged.on(0, call_everything, str(folder), limit=120)
    assert tried > 500
    assert ran == []
    assert besieged.on(1, lambda: heard) == []
    assert list(folder.iterdir()) == []
    # It still serves.
    assert besieged.on(0, lambda: rpc.rpc_sync("w1", make, ("tensor",)).tolist()) == [
        [1, 1],
        [1, 1],
    ]


def test_a_refused_call_says_what_and_where_and_what_to_do(besieged):
    def refused(of: Any) -> str:
        with pytest.raises(rpc.NotAllowed, match="worker 'w1'") as caught:
            of()
        return str(caught.value)

    def case() -> list[str]:
        rref = rpc.remote("w1", make, ("array",))
        return [
            refused(lambda: rpc.rpc_sync("w1", canary)),
            refused(lambda: rref.rpc_sync().tofile("x")),
            refused(lambda: rref.rpc_async().tofile("x").wait()),
            refused(lambda: rref.remote().tofile("x").to_here()),
        ]

    said = besieged.on(0, case)
    assert f"{__name__}.canary" in said[0]
    for each in said[1:]:
        assert each.startswith("worker 'w1' does not allow calls of numpy.ndarray.tofile: ")
    for each in said:
        assert "option" in each
        assert len(each) < 300


def test_a_reference_to_a_value_shows_what_may_be_called(besieged):
    def case() -> Any:
        rref = rpc.remote("w1", make, ("tensor",))
        assert rref.rpc_sync().sum().item() == 4
        assert rref.rpc_async().add(1).wait().tolist() == [[2, 2], [2, 2]]
        assert rref.remote().mul(3).to_here().tolist() == [[3, 3], [3, 3]]
        assert rref.to_here().tolist() == [[1, 1], [1, 1]]

    besieged.on(0, case)


# -- a worker with exported_only and nothing else ---------------------------------------------------


@rpc.export
def echo(value: Any) -> Any:
    return value


@pytest.fixture
def strict() -> Iterator[Workers]:
    with Workers(2) as workers:
        pending = workers.begin(0, rpc_workers.join)
        workers.on(1, lambda: rpc_workers.join(exported_only=True))
        pending.result(20)
        yield workers
        workers.run(rpc_workers.leave)


def _called(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


# Handwritten pickle instructions that run code, or lead to it. Each takes the function's place in a call.
OPCODES = {
    "reduce": _called("os", "mkdir") + b"(V{path}\ntR",
    "reduce of eval": _called("builtins", "eval") + b"(V__import__('os').mkdir('{path}')\ntR",
    "inst": b"(V{path}\nios\nmkdir\n",
    "obj": b"(" + _called("os", "mkdir") + b"V{path}\no",
    "newobj": _called("subprocess", "Popen") + b"(V{path}\nt\x81",
    "newobj_ex": _called("subprocess", "Popen") + b"(V{path}\nt}\x92",
    "build": _called("rallypoint.errors", "RpcError")
    + b")\x81}Vx\nK\1sb"
    + _called("rallypoint.errors", "RpcError")
    + b"}Vx\nK\1sb",
    "extension": b"\x82\x07",
    "persistent id": b"P{path}\n",
    "getattr": _called("builtins", "getattr") + b"(" + _called("os", "path") + b"Vos\ntR",
    "a path through a module": _called(__name__, "os.mkdir") + b"(V{path}\ntR",
    "a partial": _called("functools", "partial") + b"(" + _called("os", "mkdir") + b"V{path}\ntR",
    "an operator": _called("rallypoint.rpc.serialization.script", "load_torch_function")
    + b"(Vfrom_file\ntR",
}


def test_instructions_written_by_hand_are_refused_over_the_wire(strict, tmp_path):
    path = tmp_path / "made"

    def attack(where: str) -> dict[str, str]:
        from rallypoint.rpc.serialization import payload as payloads

        real = payloads.known_call
        got_in = {}
        for what, program in OPCODES.items():
            body = b"\x80\x05" + program.replace(b"{path}", where.encode()) + b")N\x87."
            payloads.known_call = lambda _, body=body: body
            try:
                got_in[what] = repr(rpc.rpc_sync("w1", echo, (1,), timeout=20))
            except (rpc.NotAllowed, pickle.UnpicklingError):
                pass
            except Exception as error:
                got_in[what] = repr(error)
            finally:
                payloads.known_call = real
        assert rpc.rpc_sync("w1", echo, (1,)) == 1
        return got_in

    assert strict.on(0, attack, str(path)) == {}
    assert not path.exists()


def test_methods_of_references_and_futures_are_refused(strict):
    """They wait, call back, and reach other workers."""

    def attempts(kind: type, value: Any) -> list[str]:
        got_in = []
        for name in dir(kind):
            function = getattr(kind, name)
            if name in ("__class__", "__doc__") or not callable(function):
                continue
            for args in ((), (value,), (value, canary)):
                try:
                    got_in.append(f"{name}: {rpc.rpc_sync('w1', function, args, timeout=10)!r}")
                except (rpc.NotAllowed, AttributeError, TypeError, pickle.PicklingError):
                    pass
        return got_in

    def of_references() -> list[str]:
        return attempts(rpc.RRef, rpc.remote("w1", echo, (1,)))

    def of_their_values() -> list[str]:
        got_in = []
        rref = rpc.remote("w1", echo, (1,))
        for name in dir(rpc.RRef):
            try:
                got_in.append(f"{name}: {rref.rpc_sync()._invoke(name, (), {})!r}")
            except (rpc.NotAllowed, AttributeError):
                pass
        return got_in

    def attack() -> list[str]:
        future = type(rpc.rpc_async("w1", echo, (1,)))
        got_in = [*attempts(torch.futures.Future, None), *attempts(future, None)]
        got_in += [*of_references(), *of_their_values()]
        gc.collect()  # errors hold the references
        return got_in

    assert strict.on(0, attack, limit=120) == []
    assert strict.on(1, lambda: heard) == []
