"""Messages that are made to get past a list: written by hand, instruction by instruction, and at random."""

from __future__ import annotations

import copyreg
import functools
import pickle
import struct
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rallypoint.errors import NotAllowed
from rallypoint.rpc import export
from rallypoint.rpc.rref_proxy import call_method
from rallypoint.rpc.serialization import payload
from rallypoint.rpc.serialization.allowlist import AllowList
from rallypoint.rpc.serialization.tensor_reader import rebuild_coo


HERE = __name__
ran: list[Any] = []
# Audit events about files, processes and libraries.
WATCHED = ("open", "os.", "subprocess.", "ctypes.dlopen", "exec", "import", "shutil.", "socket.")
CANARY = "/canary-of-the-escape-suite"


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event.startswith(WATCHED) and any(CANARY in str(each) for each in args if each is not None):
        ran.append((event, args))


sys.addaudithook(_hear)


@pytest.fixture(autouse=True)
def _nothing_runs():
    ran.clear()
    yield
    assert ran == []


@dataclass
class Point:
    x: int = 0

    def moved(self) -> Point:
        return Point(self.x + 1)


class Slotted:
    __slots__ = ("a",)


class Listed(list):
    pass


class Unlisted:
    """Not on the list."""

    def __setstate__(self, state: Any) -> None:
        ran.append(state)

    def __call__(self, *args: Any) -> None:
        ran.append(args)

    def extend(self, items: Any) -> None:
        ran.append(items)

    append = __setitem__ = add = update = extend


unlisted = Unlisted()


def canary(*args: Any, **kwargs: Any) -> None:
    ran.append((args, kwargs))


@export
def exported(x: int = 1) -> int:
    return x + 1


@functools.wraps(exported)
def alike(x: int = 1) -> None:
    canary(x)


@export
class Actor:
    def __init__(self) -> None:
        self.held = canary

    def public(self) -> str:
        return "public"

    def _private(self) -> None:
        canary()

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def made(cls) -> str:
        return "made"


class Heir(Actor):
    def public(self) -> str:
        return "heir"

    def more(self) -> None:
        canary()


class Partly:
    @export
    def public(self) -> str:
        return "public"

    def other(self) -> None:
        canary()


# -- by hand ---------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, what: str) -> bytes:
    return text(module) + text(what) + b"\x93"


def value(what: object) -> bytes:
    """Instructions that push a plain value."""
    return pickle.dumps(what, 2)[2:-1]


def program(*pieces: bytes) -> bytes:
    return b"\x80\x04" + b"".join(pieces) + b"."


HERES = [f"{HERE}.Point", f"{HERE}.Slotted", f"{HERE}.Listed"]
NARROW = AllowList(HERES)
WIDE = AllowList([HERE])
SPLIT = AllowList([HERE], called=[])
EXPORTED = AllowList([], exported=True)
POINT = name(HERE, "Point") + b")\x81"
TENSOR = payload.dumps(torch.ones(2))[0][2:-1]
if TENSOR[:1] == b"\x95":
    TENSOR = TENSOR[9:]
OURS = "rallypoint.rpc.serialization.tensor_reader"

REFUSED: dict[str, bytes] = {
    "reduce": name(HERE, "canary") + value((1,)) + b"R",
    "reduce of a builtin": name("builtins", "eval") + value((f"open({CANARY!r})",)) + b"R",
    "a global in text": b"c" + HERE.encode() + b"\ncanary\n)R",
    "inst": b"(i" + HERE.encode() + b"\nUnlisted\n",
    "inst of a function": b"(I1\ni" + HERE.encode() + b"\ncanary\n",
    "obj": b"(" + name(HERE, "Unlisted") + b"o",
    "obj of a function": b"(" + name(HERE, "canary") + value(1) + b"o",
    "newobj": name(HERE, "Unlisted") + b")\x81",
    "newobj_ex": name(HERE, "Unlisted") + b")}\x92",
    "newobj of what is no class": POINT + b")\x81",
    "ext1": b"\x82\x07",
    "ext2": b"\x83\x07\x00",
    "ext4": b"\x84\x07\x00\x00\x00",
    "persistent id": b"Pcanary\n",
    "persistent id from the stack": value("canary") + b"Q",
    "stack global, dotted": name(HERE, "Point.__subclasses__") + b")R",
    "stack global through a module": name(HERE, "pickle.loads") + value((b"N.",)) + b"R",
    "stack global through a function": name(HERE, "canary.__globals__"),
    "stack global, a dunder": name(HERE, "__builtins__"),
    "a module": name(HERE, "pickle"),
    "build on a class": name(HERE, "Point") + value({"moved": 1}) + b"b",
    "build on a class, slots": name(HERE, "Point") + value((None, {"moved": 1})) + b"b",
    "build on an exception class": name("builtins", "ValueError") + value({"x": 1}) + b"b",
    "build on a tensor": TENSOR + value({"numpy": 1}) + b"b",
    "build on a tensor, its own way": TENSOR + value((1, 2, 3, 4)) + b"b",
    "build with a class": POINT + value({"__class__": 1}) + b"b",
    "build with a dict": POINT + value((None, {"__dict__": {}})) + b"b",
    "build with names that are none": POINT + value({1: 1}) + b"b",
    "build on an exception": name("builtins", "ValueError")
    + b")R"
    + value({"__cause__": 1})
    + b"b",
    "build on a number": value(1) + value({"x": 1}) + b"b",
    "our own function, called with what is chosen": (
        name(OURS, "rebuild_on_device") + POINT + value("cpu") + b"N\x87Rb"
    ),
    "our own function, filled": name(OURS, "rebuild_small") + value({"x": 1}) + b"b",
    "our own function, called in the message": (
        name("rallypoint.rpc.rref_proxy", "call_method") + b"(NX\x01\x00\x00\x00x)}tR"
    ),
    "a method, called in the message": (
        name("builtins", "getattr") + POINT + text("moved") + b"\x86R)R"
    ),
    "getattr of a dunder": name("builtins", "getattr") + POINT + text("__class__") + b"\x86R",
    "getattr of a tensor's": name("builtins", "getattr") + TENSOR + text("numpy") + b"\x86R",
    "append": POINT + value(1) + b"a",
    "appends": POINT + b"(" + value(1) + b"e",
    "setitem": POINT + value(1) + value(1) + b"s",
    "setitems": POINT + b"(" + value(1) + value(1) + b"u",
    "additems": POINT + b"(" + value(1) + b"\x90",
    "memo: a name, used after its turn": (
        name(HERE, "Point") + b"q\x05" + b"0" + name(HERE, "canary") + b"q\x050h\x05)R"
    ),
    "memo: a place that is empty": b"h\x63",
    "arguments that are none": name(HERE, "Point") + value([1]) + b"R",
    "a tensor by its constructor": name("torch", "Tensor") + b")}X\x05\x00\x00\x00cdataK\x01s\x92",
    "an array by its constructor": name("numpy", "ndarray") + value(((1,),)) + b"R",
    "an array of another class": (
        name("numpy._core.multiarray", "_reconstruct")
        + name("numpy", "memmap")
        + b"K\0\x85Cbt\x87R"
    ),
    "a file by the back door": name("torch", "PyTorchFileWriter") + value((CANARY,)) + b"R",
    "an operator that opens a file": (
        name("rallypoint.rpc.serialization.script", "load_torch_function")
        + value(("from_file",))
        + b"R"
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_before_anything_runs(what: str) -> None:
    copyreg.add_extension(HERE, "canary", 7)
    try:
        before = dict(vars(Point)), dict(vars(Slotted))
        with pytest.raises(
            (NotAllowed, pickle.UnpicklingError, TypeError, EOFError, KeyError, AttributeError)
        ):
            payload.loads(program(REFUSED[what]), allowed=NARROW)
        assert (dict(vars(Point)), dict(vars(Slotted))) == before
    finally:
        copyreg.remove_extension(HERE, "canary", 7)
        copyreg.clear_extension_cache()


def test_a_number_that_stands_for_a_name_is_refused_though_it_was_resolved_before() -> None:
    copyreg.add_extension(HERE, "canary", 7)
    try:
        assert pickle.loads(program(b"\x82\x07")) is canary
        with pytest.raises(NotAllowed, match="by the number 7"):
            payload.loads(program(b"\x82\x07"), allowed=WIDE)
    finally:
        copyreg.remove_extension(HERE, "canary", 7)
        copyreg.clear_extension_cache()


@pytest.mark.parametrize("made", [Point(3), [Point(1), {"a": Point(2)}], Listed([1, 2])])
def test_what_is_listed_arrives_as_python_would_read_it(made: Any) -> None:
    for protocol in range(6):
        data = pickle.dumps(made, protocol)
        if protocol >= 2:
            assert payload.loads(data, allowed=NARROW) == pickle.loads(data)
    slotted = Slotted()
    slotted.a = 5
    assert payload.loads(pickle.dumps(slotted), allowed=NARROW).a == 5


def test_our_own_functions_are_nothing_that_can_be_called_or_passed_on() -> None:
    for full in ("serialization.tensor_reader.rebuild_small", "rref_proxy.call_method"):
        module, _, what = f"rallypoint.rpc.{full}".rpartition(".")
        found = payload.loads(program(b"(", name(module, what), b"t"), allowed=WIDE)
        assert not callable(found[0])
    with pytest.raises(NotAllowed, match="does not allow calls of"):
        WIDE.callee(payload.loads(program(name(OURS, "rebuild_small")), allowed=WIDE))


class Sparse:
    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> Any:
        places = torch.tensor([[self.index]])
        return rebuild_coo, (places, torch.ones(1), (2,), True, False)


def test_indices_that_lead_beyond_a_tensor_are_refused() -> None:
    data = payload.dumps(Sparse(1))[0]
    assert payload.loads(data, allowed=NARROW).to_dense().tolist() == [0.0, 1.0]
    with pytest.raises(RuntimeError, match="size"):
        payload.loads(payload.dumps(Sparse(7))[0], allowed=NARROW)


def test_two_lists_are_two() -> None:
    """What may be rebuilt must not be called, neither as a call nor while a message is read."""
    found = payload.loads(program(name(HERE, "canary")), allowed=AllowList([f"{HERE}.canary"], []))
    assert not callable(found)
    for split in (SPLIT, AllowList([HERE], exported=True)):
        with pytest.raises(NotAllowed):
            payload.loads(program(name(HERE, "canary"), b")R"), allowed=split)
        with pytest.raises(NotAllowed):
            split.method(Point(1), "moved")
        assert payload.loads(pickle.dumps(Point(1)), allowed=split) == Point(1)
    calls = AllowList([], [f"{HERE}.Point"])
    assert calls.method(Point(1), "moved")() == Point(2)
    with pytest.raises(NotAllowed):
        payload.loads(pickle.dumps(Point(1)), allowed=calls)


def test_exported_is_callable_and_nothing_else() -> None:
    call = EXPORTED.call

    def sent(what: Any) -> Any:
        return call(payload.loads(pickle.dumps((what, (), None)), allowed=EXPORTED))[0]()

    assert sent(exported) == 2
    assert sent(Actor.static) == "static"
    assert sent(Actor.made) == "made"
    assert type(sent(Actor)) is Actor
    assert EXPORTED.method(Actor(), "public")() == "public"
    assert EXPORTED.method(Heir(), "public")() == "heir"
    assert EXPORTED.method(Partly(), "public")() == "public"
    for what in (canary, Heir, Partly, Unlisted, print, torch.add):
        with pytest.raises(
            NotAllowed, match=r"mark it with @rpc.export, or add it to the option allowed_calls"
        ):
            sent(what)
    # pickle refuses it, since its name leads elsewhere. A message written by hand can contain it.
    with pytest.raises(NotAllowed):
        call(payload.loads(program(name(HERE, "alike"), b")N\x87"), allowed=EXPORTED))
    for owner, method in (
        (Actor(), "_private"),
        (Actor(), "held"),
        (Actor(), "__init__"),
        (Heir(), "more"),
        (Partly(), "other"),
    ):
        with pytest.raises(NotAllowed):
            EXPORTED.method(owner, method)


def test_a_partial_is_what_it_holds() -> None:
    allowed = AllowList(["functools.partial"], [f"{HERE}.exported"])
    sent = payload.loads(pickle.dumps(functools.partial(exported, 4)), allowed=allowed)
    assert allowed.callee(sent)() == 5
    assert not allowed._may_call(functools.partial(canary))
    with pytest.raises(NotAllowed):
        payload.loads(program(name("functools", "partial"), b")\x81"), allowed=EXPORTED)


@pytest.mark.parametrize("torchs", [["torch"], ["torch.Tensor"]])
def test_operators_that_open_files_are_listed_by_their_name(torchs: list[str]) -> None:
    loader = (
        name("rallypoint.rpc.serialization.script", "load_torch_function")
        + value(("from_file",))
        + b"R"
    )
    with pytest.raises(NotAllowed, match="from_file"):
        payload.loads(program(loader), allowed=AllowList(torchs))
    assert payload.loads(program(loader), allowed=AllowList(["torch.from_file"])) is torch.from_file


# -- every method ----------------------------------------------------------------------------------


def _typed_storage() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ones(2).storage()


ALL = ["torch.Tensor", "torch.storage", "numpy.ndarray", "numpy.float64", "torch.nn"]
VALUES: dict[str, Any] = {
    "tensor": torch.ones(2, 2, requires_grad=True),
    "storage": torch.ones(2).untyped_storage(),
    "typed storage": _typed_storage(),
    "array": np.ones(2),
    "number": np.float64(2),
    "module": torch.nn.Linear(1, 1),
}
# What no list of classes gives access to.
BEYOND = {
    "tensor": {"apply_", "map_", "data_ptr", "share_memory_", "new", "register_hook", "__reduce__"},
    "storage": {"from_file", "from_buffer", "data_ptr", "share_memory_", "_new_shared_cpu"},
    "typed storage": {"from_file", "from_buffer", "data_ptr", "_write_file"},
    "array": {"tofile", "dump", "dumps", "setfield", "setflags", "ctypes", "__array_interface__"},
    "number": {"tofile", "dump", "dumps"},
    "module": {"apply", "register_forward_hook", "__setstate__"},
}


@pytest.mark.parametrize("what", VALUES)
def test_no_method_reaches_beyond_its_value(what: str) -> None:
    nothing, everything = AllowList([]), AllowList(ALL)
    held, permitted = VALUES[what], set()
    for each in dir(held):
        with pytest.raises(NotAllowed):
            nothing.method(held, each)
        try:
            everything.method(held, each)
        except NotAllowed:
            continue
        except (AttributeError, RuntimeError, ValueError, NotImplementedError):
            pass
        permitted.add(each)
    assert not permitted & BEYOND[what]
    assert not [each for each in permitted if each.startswith("_")]
    kind = type(held)
    for method in BEYOND[what]:
        if callable(getattr(held, method, None)) and not method.startswith("_"):
            full = f"{kind.__module__}.{kind.__qualname__}.{method}"
            AllowList([], [full]).method(held, method)


def test_what_a_value_holds_is_no_method_of_its_own() -> None:
    class Holder(Point):
        pass

    held = Holder(1)
    held.moved = canary  # type: ignore[method-assign]
    held.hook = canary  # type: ignore[attr-defined]
    Holder.__module__, Holder.__qualname__ = "listed", "Holder"
    allowed = AllowList([], ["listed.Holder"])
    for method in ("moved", "hook"):
        with pytest.raises(NotAllowed, match="canary"):
            allowed.method(held, method)


# -- at random -------------------------------------------------------------------------------------

NAMES = [
    (HERE, "canary"),
    (HERE, "Unlisted"),
    (HERE, "unlisted"),
    (HERE, "Point"),
    (HERE, "Slotted"),
    (HERE, "Listed"),
    (HERE, "Point.moved"),
    ("builtins", "getattr"),
    ("builtins", "setattr"),
    ("builtins", "open"),
    ("builtins", "ValueError"),
    ("builtins", "slice"),
    ("os", "mkdir"),
    ("torch", "Tensor"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    (OURS, "rebuild_small"),
    (OURS, "rebuild_grad"),
    (OURS, "rebuild_on_device"),
    (OURS, "rebuild_saved"),
    ("rallypoint.rpc.rref_proxy", "call_method"),
    ("rallypoint.rpc.references.ids", "Fork"),
    ("rallypoint.rpc.serialization.script", "load_torch_function"),
    ("rallypoint.rpc.serialization.allowlist", "Rebuilder"),
    ("rallypoint.rpc.serialization.payload", "loads"),
]
instructions = st.one_of(
    st.sampled_from(NAMES).map(lambda each: name(*each)),
    st.sampled_from([CANARY, "append", "__class__", "__dict__", "func", 1, None, b"N.", ()]).map(
        value
    ),
    st.sampled_from(
        [
            b")",
            b"}",
            b"]",
            b"(",
            b"\x8f",
            b"\x85",
            b"\x86",
            b"\x87",
            b"t",
            b"R",
            b"b",
            b"\x81",
            b"\x92",
            b"o",
            b"a",
            b"e",
            b"s",
            b"u",
            b"\x90",
            b"2",
            b"0",
            b"1",
            b"q\x01",
            b"h\x01",
            b"\x94",
            b"\x82\x01",
            b"Q",
            b"\x91",
        ]
    ),
)


# It checks for itself what it is asked to call.
OWN = (call_method,)
REBUILT_ONLY = AllowList(HERES, [])
ON = {NARROW: (Point.moved,), REBUILT_ONLY: (), EXPORTED: (exported, Actor)}


@settings(max_examples=800, deadline=None)
@given(st.lists(instructions, min_size=1, max_size=14), st.sampled_from(list(ON)))
def test_no_program_gets_out(pieces: list[bytes], allowed: AllowList) -> None:
    ran.clear()
    try:
        found = payload.loads(program(*pieces), allowed=allowed)
    except Exception:  # whatever it is, nothing has run
        found = None
    try:
        func, _args, _kwargs = allowed.call((found, (CANARY,), None))
    except NotAllowed:
        func = None
    assert func in (None, Point, Slotted, Listed, *OWN, *ON[allowed])
    assert ran == []


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_get_out(data: bytes) -> None:
    try:
        payload.loads(b"\x80\x04" + data, allowed=NARROW)
    except Exception:  # the same
        pass
    assert ran == []
