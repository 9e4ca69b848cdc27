"""What arrives of what was sent: tensors of every kind, shared memory, objects without a name, and what is not allowed."""

import collections
import io
import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.errors import MessageTooLarge, NotAllowed
from rallypoint.rpc.agent.call_errors import translated
from rallypoint.rpc.serialization.allowlist import AllowList
from rallypoint.rpc.serialization.payload import dumps, dumps_call, loads, loads_call, packed_call
from rallypoint.rpc.serialization.tensor_reader import DTYPES, rebuild_small
from rallypoint.rpc.serialization.tensor_writer import TensorWriter
from rallypoint.wire import frames


def sent(obj: Any, **options: Any) -> Any:
    """Sent to the other side, and read into memory of its own."""
    data, writer = dumps(obj, **options)
    return loads(data, [bytearray(each) for each in writer.buffers])


def same(found: torch.Tensor, original: torch.Tensor) -> bool:
    if (
        type(found) is not type(original)
        or found.dtype != original.dtype
        or found.shape != original.shape
        or found.layout != original.layout
        or found.requires_grad != original.requires_grad
        or found.device != original.device
    ):
        return False
    if found.layout is torch.strided:
        steps = zip(found.stride(), original.stride(), original.shape, strict=True)
        if original.numel() and any(a != b for a, b, count in steps if count > 1):
            return False
        if found.is_quantized:
            return torch.equal(found.int_repr(), original.int_repr())
        if found.dtype.itemsize == 1 and found.dtype.is_floating_point:
            return torch.equal(found.view(torch.uint8), original.view(torch.uint8))
    return torch.equal(found.detach().to_dense(), original.detach().to_dense())


def random_bytes(count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.arange(count) % 3 == 0
    return torch.randint(0, 100, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)


# -- tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(), (1,), (0,), (7,), (3, 5), (2, 0, 3), (200, 30)])
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_type_arrives_at_every_size(dtype, size):
    count = 1
    for each in size:
        count *= each
    original = random_bytes(count, dtype).reshape(size)
    found = sent(original)
    assert found.dtype == dtype
    assert found.shape == original.shape
    assert found.reshape(-1).view(torch.uint8).equal(original.reshape(-1).view(torch.uint8))


def test_types_that_come_with_later_versions_of_torch_arrive_too():
    known = set(DTYPES)
    for name in dir(torch):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype) and dtype not in known:
            try:
                original = torch.zeros(4, dtype=dtype)
                torch.save(original, io.BytesIO())
            except (RuntimeError, NotImplementedError, TypeError, KeyError):
                continue  # torch itself cannot send it anywhere
            assert sent(original).dtype == dtype


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).reshape(3, 4).t(),
        lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        lambda: torch.arange(100.0)[::2],
        lambda: torch.arange(100.0)[3:7],
        lambda: torch.arange(10_000.0)[::1000],
        lambda: torch.arange(10_000.0)[5_000:5_003],
        lambda: torch.ones(1).expand(1000),
        lambda: torch.ones(3, 1).expand(3, 500),
        lambda: torch.arange(6.0).reshape(2, 3)[:, None].expand(2, 4, 3),
        lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.arange(10_000.0).reshape(100, 100)[10:20, 30:33],
        lambda: torch.empty(0, 3).t(),
        lambda: torch.tensor(3.5),
        lambda: torch.arange(20.0).as_strided((4, 4), (2, 1), 3),
        # Overlapping elements, with wide gaps between them.
        lambda: torch.arange(60.0).as_strided((2, 3), (0, 25), 3),
        # Memory whose size is no multiple of the element's.
        lambda: torch.arange(10, dtype=torch.uint8)[:8].view(torch.int32),
        lambda: torch.arange(4099, dtype=torch.int32).view(torch.uint8)[:-2].view(torch.int16),
        lambda: torch.zeros(20_003, dtype=torch.uint8)[:20_000].view(torch.float64),
        lambda: torch.zeros(20_003, dtype=torch.uint8)[3:11].view(torch.uint8),
    ],
)
def test_strides_are_kept_whatever_part_of_its_memory_a_tensor_shows(make):
    original = make()
    assert same(sent(original), original)


@given(data=st.data())
def test_any_view_of_any_memory_arrives(data):
    base = torch.arange(data.draw(st.integers(1, 200), "memory"), dtype=torch.int32)
    size = data.draw(st.lists(st.integers(0, 5), max_size=3), "size")
    stride = [data.draw(st.integers(0, 9), "stride") for _ in size]
    span = 1 + sum(step * (count - 1) for step, count in zip(stride, size, strict=True) if count)
    if span > base.numel():
        base = torch.arange(span, dtype=torch.int32)
    offset = data.draw(st.integers(0, base.numel() - span), "offset")
    original = base.as_strided(size, stride, offset)
    assert same(sent(original), original)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 3),
        lambda: torch.empty(0, 3),
        lambda: torch.arange(30_000.0)[::10_000],
        lambda: torch.ones(1).expand(100),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        # Written in torch.save's format.
        lambda: torch.zeros(3, dtype=torch.float8_e8m0fnu),
        lambda: torch._efficientzerotensor((3,)),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_default_device_does_not_move_what_arrives(make):
    original = make()
    with torch.device("meta"):
        found = sent(original)
    assert found.device.type == "cpu"
    assert torch.equal(found.detach().to_dense(), original.detach().to_dense())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_default_device_does_not_move_nested_tensors():
    original = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with torch.device("meta"):
        found = sent(original)
    assert found.device.type == "cpu"
    assert [each.tolist() for each in found.unbind()] == [[1, 1], [1, 1, 1]]


def test_a_small_part_of_a_large_memory_does_not_take_it_along():
    whole = torch.arange(1_000_000.0)
    for part in (whole[10:20], whole[::100_000], whole.reshape(1000, 1000)[5:7, 3:5]):
        _, writer = dumps(part)
        assert sum(each.nbytes for each in writer.buffers) <= 4 * 2100


def test_what_shares_memory_shares_it_over_there():
    base = torch.arange(10.0)
    whole, again, first, second = sent([base, base, base[:8], base[1:]])
    whole[5] = 99
    assert again[5] == 99
    assert first[5] == 99
    assert second[4] == 99
    apart = sent([torch.ones(3), torch.ones(3)])
    apart[0].zero_()
    assert apart[1].all()


@pytest.mark.parametrize("count", [8, 30_000])
def test_memories_that_begin_at_one_address_and_differ_in_size_arrive_each_as_it_is(count):
    array = np.arange(count, dtype=np.float32)
    whole, part = torch.from_numpy(array), torch.from_numpy(array[: count // 2])
    square = torch.from_numpy(array.reshape(2, -1))
    for tensors in ([whole, part], [part, whole], [part, square], [square, part]):
        for found, original in zip(sent(tensors), tensors, strict=True):
            assert same(found, original)


def test_a_tensor_whose_memory_and_size_differ_is_refused():
    with pytest.raises(RuntimeError, match="invalid for input of size 8"):
        rebuild_small(bytearray(32), DTYPES.index(torch.float32), (2,), False)


def test_what_shares_memory_shares_it_in_a_call_too():
    base = torch.arange(10.0)
    for args in ((base, base), (base, base[2:]), (base[1:], base[:9])):
        data, writer = dumps_call(same, args, None)
        buffers = [bytearray(each) for each in writer.buffers] if writer else []
        _, (one, other), _ = loads(data, buffers)
        one += 100
        assert (other >= 100).sum() >= 8


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4, 5], (2, 3)),
        lambda: torch.sparse_coo_tensor([[0, 0], [2, 2]], [3.0, 4], (2, 3)),
        lambda: torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 4), (3, 4)).coalesce(),
        lambda: torch.sparse_coo_tensor([[], []], [], (2, 3)),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.eye(4).to_sparse_bsc((2, 2)),
        lambda: torch.eye(3).to_sparse().requires_grad_(),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_keep_their_layout(make):
    original = make()
    found = sent(original)
    assert found.layout == original.layout
    assert found.shape == original.shape
    assert found.requires_grad == original.requires_grad
    if original.layout is torch.sparse_coo:
        assert found.is_coalesced() == original.is_coalesced()
    assert torch.equal(found.detach().to_dense(), original.detach().to_dense())


def test_gradients_are_wanted_over_there_where_they_are_here_and_the_graph_stays():
    leaf = torch.ones(3, requires_grad=True)
    assert sent(leaf).requires_grad
    result = leaf * 2
    found = sent(result)
    assert found.requires_grad
    assert found.is_leaf
    assert not sent(result.detach()).requires_grad
    assert sent(torch.ones(0, requires_grad=True)).requires_grad
    assert sent(torch.ones(50_000, requires_grad=True)[::2]).requires_grad


def test_parameters_modules_and_their_shared_weights_arrive():
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    found = sent(parameter)
    assert type(found) is torch.nn.Parameter
    assert not found.requires_grad
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    copy = sent(module)
    assert copy[1].weight is copy[0].weight
    assert torch.equal(copy[1].bias, module[1].bias)
    inputs = torch.ones(2, 4)
    assert torch.equal(copy(inputs), module(inputs))


@pytest.mark.parametrize("kind", ["scripted", "traced", "loaded"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_modules_arrive_with_their_code_and_pass_no_list(kind):
    inputs = torch.ones(2, 4)
    plain = torch.nn.Linear(4, 3)
    module = torch.jit.trace(plain, inputs) if kind == "traced" else torch.jit.script(plain)
    if kind == "loaded":
        torch.jit.save(module, file := io.BytesIO())
        file.seek(0)
        module = torch.jit.load(file)
    for found in (sent(module), sent({"inside": torch.nn.Sequential(module)})["inside"][0]):
        assert isinstance(found, torch.jit.ScriptModule)
        assert torch.equal(found(inputs), plain(inputs))
    with pytest.raises(NotAllowed):
        loads(dumps(module)[0], allowed=AllowList(("torch",)))


def test_parameters_keep_their_attributes():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.no_decay = True  # type: ignore[attr-defined]
    parameter.group = [parameter]  # type: ignore[attr-defined]
    module = torch.nn.Linear(2, 2)
    module.weight.tag = "first"  # type: ignore[assignment]
    found, copy = sent((parameter, module))
    assert found.no_decay
    assert found.group[0] is found
    assert copy.weight.tag == "first"
    assert not vars(copy.bias)
    data, writer = dumps(parameter)
    assert loads(data, [bytearray(each) for each in writer.buffers], allowed=AllowList(())).no_decay


def test_an_attribute_cannot_replace_a_method_under_a_list():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.numel = 5  # type: ignore[method-assign, assignment]
    assert sent(parameter).numel == 5
    with pytest.raises(NotAllowed, match="would hide"):
        loads(dumps(parameter)[0], allowed=AllowList(()))


class Named(torch.Tensor):
    """A subclass with an attribute of its own."""

    label: str = ""


def test_subclasses_stay_what_they_are():
    original = torch.arange(6.0).as_subclass(Named)
    original.label = "mine"
    found = sent(original)
    assert type(found) is Named
    assert found.label == "mine"
    assert found.tolist() == original.tolist()
    buffer = torch.nn.Buffer(torch.ones(2))
    assert torch.equal(sent(buffer), buffer)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_lazy_negatives_conjugates_and_quantized_tensors_arrive_as_their_values():
    complex_ = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(sent(complex_.conj()), complex_.conj())
    assert torch.equal(sent(complex_.conj().imag), complex_.conj().imag)
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8)
    assert torch.equal(sent(quantized).dequantize(), quantized.dequantize())


def test_tensors_without_memory_of_their_own_arrive_or_are_refused_by_name():
    meta = torch.empty(3, 4, device="meta", requires_grad=True).t()
    arrived = sent([meta])[0]
    assert (arrived.device, arrived.stride()) == (meta.device, meta.stride())
    assert arrived.requires_grad
    assert torch.equal(sent([torch._efficientzerotensor(3)])[0], torch.zeros(3))

    functional = torch._to_functional_tensor(torch.ones(3))
    for pack in (lambda x: dumps([x]), lambda x: packed_call((sent, (x,), None)) or dumps([x])):
        with pytest.raises(ValueError, match="a functional tensor .* cannot be sent"):
            pack(functional)
        with pytest.raises(ValueError, match=r"a tensor inside torch.func.vmap cannot be sent"):
            torch.func.vmap(pack)(torch.ones(3))
        with pytest.raises(ValueError, match=r"a tensor inside torch.func.grad, .* cannot be sent"):
            torch.func.grad(pack)(torch.ones(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_mkldnn_tensors_arrive():
    parts = [torch.rand(2, 3), torch.rand(4, 3)]
    nested = sent([torch.nested.nested_tensor(parts, requires_grad=True)])[0]
    assert nested.is_nested
    assert nested.requires_grad
    assert all(map(torch.equal, nested.detach().unbind(), parts))
    x = torch.rand(4, 4)
    arrived = sent([x.to_mkldnn()])[0]
    assert arrived.is_mkldnn
    assert torch.equal(arrived.to_dense(), x)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gone", "function"),
        ("_gone", "function"),
        ("Gone", "class"),
        ("_Gone", "class"),
        ("Outer.Gone", "class"),
        ("Outer.gone", "method"),
        ("outer.gone", "function"),
    ],
)
def test_what_is_not_there_is_called_what_it_is(name, kind):
    error = AttributeError(f"Can't get attribute {name!r} on <module 'm' from 'm.py'>")
    assert f"The callee does not have this {kind}" in str(translated(error))


def test_a_tensor_on_another_device_is_refused_with_what_to_do():
    class Elsewhere:
        """What is asked of a tensor before its memory is; no accelerator is available here."""

        is_nested, layout, device = False, torch.strided, torch.device("cuda:0")

    elsewhere: Any = Elsewhere()
    with pytest.raises(ValueError, match=r"cuda:0.*options\.set_device_map"):
        TensorWriter().reduce(elsewhere)


def test_what_arrives_is_not_the_senders_memory():
    original = torch.zeros(5_000)
    data, writer = dumps([original])
    found = loads(data, [bytearray(each) for each in writer.buffers])[0]
    found += 1
    assert not original.any()


# -- anything else ------------------------------------------------------------------------------


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024  # the kind without types must travel, too


class Thing:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        1.5,
        "text \udce4 \0",
        b"\0" * 10_000,
        bytearray(b"x"),
        (),
        [1, [2, (3,)]],
        {"a": {1: {2}}},
        frozenset({1}),
        range(3),
        ...,
        1 + 2j,
        Point(1, [2]),
        collections.OrderedDict(a=1),
        ValueError("bad"),
        int,
        len,
        os.path.join,
        torch.float16,
        torch.Size([1, 2]),
        torch.device("cpu"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_anything_that_pickles_arrives(value):
    found = sent(value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_tensors_inside_of_things_are_not_pickled_but_sent_beside():
    thing = Thing({"deep": [torch.ones(10_000), (torch.zeros(10_000),)]})
    data, writer = dumps(Point(thing, [thing]))
    assert len(data) < 1000
    assert len(writer.buffers) == 2
    found = loads(data, [bytearray(each) for each in writer.buffers])
    assert found.x is found.y[0]
    assert found.x.value["deep"][0].sum() == 10_000


def test_cycles_arrive():
    cycle: list[Any] = [torch.ones(2)]
    cycle.append(cycle)
    found = sent(cycle)
    assert found[1] is found


def test_things_pickled_within_a_pickling_do_not_disturb_it():
    class_ = Nesting(torch.ones(3))
    found = sent([torch.zeros(4), class_, torch.full((2,), 7.0)])
    assert found[0].tolist() == [0.0] * 4
    assert found[1].tensor.tolist() == [1.0] * 3
    assert found[2].tolist() == [7.0] * 2


class Nesting:
    """Writes and reads a message of its own while it is being written and read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> Any:
        data, writer = dumps(self.tensor)
        return data, [bytes(each) for each in writer.buffers]

    def __setstate__(self, state: Any) -> None:
        data, buffers = state
        self.tensor = loads(data, [bytearray(each) for each in buffers])


def test_a_message_that_fails_in_the_middle_leaves_the_next_one_alone():
    for bad in (threading.Lock(), torch.futures.Future()):
        with pytest.raises((TypeError, RuntimeError)):
            dumps([torch.ones(3), bad])
    assert sent(torch.ones(3)).tolist() == [1, 1, 1]
    with pytest.raises(pickle.UnpicklingError, match="part of a message"):
        pickle.loads(dumps(torch.ones(5_000))[0])


# -- calls --------------------------------------------------------------------------------------


def first() -> str:
    return "first"


def test_a_call_is_the_same_with_and_without_the_short_ways():
    tensor = torch.arange(3.0)
    calls = [
        (first, (), None),
        (first, (1, "a", None, b"x", 2.5, True), None),
        (first, (), {"key": 1}),
        (first, ([1],), None),
        (first, (tensor,), None),
        (Thing(3).method, (), None),
        (max, (1, 2), None),
    ]
    for func, args, kwargs in calls * 2:
        data, writer = dumps_call(func, args, kwargs)
        buffers = [bytearray(each) for each in writer.buffers] if writer else []
        found, its_args, its_kwargs = loads(data, buffers)
        assert repr(tuple(its_args)) == repr(args)
        assert (its_kwargs or None) == kwargs
        assert getattr(found, "__name__", "") == func.__name__


def test_a_name_that_means_another_function_now_is_looked_up_again(monkeypatch):
    data, _ = dumps_call(first, (), None)
    for _ in range(3):
        assert loads_call(data, 0)[0]() == "first"

    def second() -> str:
        return "second"

    monkeypatch.setitem(globals(), "first", second)
    assert loads_call(data, 0)[0]() == "second"


def test_what_has_no_name_travels_by_value_only_where_that_is_asked_for():
    base = torch.arange(3.0)

    def closure(x: int) -> Any:
        return base + x

    for func in (closure, lambda x: base + x):
        with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
            dumps_call(func, (1,), None)
        data, writer = dumps_call(func, (1,), None, by_value=True)
        found, args, _ = loads(data, [bytearray(each) for each in writer.buffers])
        assert found(*args).tolist() == [1, 2, 3]
    # Here, too, tensors travel beside the pickle, and a class is still sent by name.
    data, writer = dumps([torch.ones(10_000), Thing], by_value=True)
    assert len(data) < 1000
    assert loads(data, [bytearray(each) for each in writer.buffers])[1] is Thing


def test_a_message_that_is_too_large_says_so_and_lets_its_references_go(monkeypatch):
    monkeypatch.setattr(frames, "LIMITS", frames.Limits(payload=1 << 20, buffers=3, buffer=1 << 20))
    rows = torch.zeros(8, 3).unbind(0)
    assert len(dumps(rows[:3])[1].buffers) == 3
    small = tuple(bytes([each]) * 200_000 for each in range(6))
    for make in (lambda: dumps(rows), lambda: dumps_call(first, (rows,), None)):
        with pytest.raises(MessageTooLarge, match="with 8 tensors .*exceeds the limit of 3; stack"):
            make()
    for make in (
        lambda: dumps(["x" * 200_000 + str(each) for each in range(6)]),
        lambda: dumps_call(first, small, None),
        lambda: packed_call((first, small, None)),
    ):
        with pytest.raises(MessageTooLarge, match="exceeds the limit of 1048576; send it in parts"):
            make()
    with pytest.raises(MessageTooLarge, match="bytes in tensors"):
        dumps(torch.zeros(1 << 19))
    error = MessageTooLarge("tensors", 4, 3, "stack them")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# -- the allow-list -----------------------------------------------------------------------------


MINE = __name__
READABLE = AllowList([MINE, "collections"])


@pytest.mark.parametrize(
    "value",
    [
        3,
        [torch.ones(3), torch.ones(10_000)[::3], torch.eye(3).to_sparse()],
        torch.nn.Parameter(torch.ones(2)),
        Point(1, 2),
        collections.OrderedDict(a=1),
        Thing(torch.ones(2)),
        (first, (), None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_on_the_list_arrives(value):
    data, writer = dumps(value)
    found = loads(data, [bytearray(each) for each in writer.buffers], allowed=READABLE)
    assert type(found) is type(value)


def calling(module: str, name: str, args: tuple[Any, ...]) -> bytes:
    body = pickle.dumps(args, 2)[2:-1]  # without protocol and STOP
    names = b"".join(
        b"X" + len(text.encode()).to_bytes(4, "little") + text.encode() for text in (module, name)
    )
    return b"\x80\x04" + names + b"\x93" + body + b"R."


@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        ("os", "system", ("true",)),
        ("posix", "system", ("true",)),
        ("builtins", "eval", ("1",)),
        ("builtins", "getattr", ("", "upper")),
        ("subprocess", "run", (["true"],)),
        # Through what a module on the list, or one of ours, has imported.
        (MINE, "os.system", ("true",)),
        (MINE, "pickle.loads", ("N.",)),
        (MINE, "threading.Lock", ()),
        (MINE, "dumps.__globals__.get", ("pickle",)),
        (MINE, "Thing.__init__.__globals__.get", ("os",)),
        ("rallypoint.rpc.serialization.payload", "pickle.loads", ("N.",)),
        ("rallypoint.rpc.serialization.payload", "io.open", ("/dev/null",)),
        ("rallypoint.rpc.serialization.tensor_reader", "rebuild_saved", ("",)),
        ("rallypoint.rpc.serialization.tensor_reader", "torch.load", ("/dev/null",)),
        ("rallypoint.rpc.serialization.script", "importlib.import_module", ("os",)),
        ("rallypoint.rpc.serialization.script", "load_script_function", ("os", "system")),
        ("rallypoint.rpc.api", "shutdown", ()),
        ("collections", "_sys.exit", ()),
    ],
)
def test_nothing_else_can_be_named_on_any_way(module, name, args):
    data = calling(module, name, args)
    # rebuild_saved is reachable, but reads nothing but weights.
    with pytest.raises((NotAllowed, AttributeError, TypeError)):
        loads(data, allowed=READABLE)
