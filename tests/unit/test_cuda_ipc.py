"""Which way a GPU's tensor travels, and what becomes of its memory; the fake GPU uses this process's memory."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rallypoint.errors import NotAllowed, RpcError
from rallypoint.rpc.device_map import Device, NodeDevices
from rallypoint.rpc.groups.member import Member
from rallypoint.rpc.serialization import cuda_ipc
from rallypoint.rpc.serialization.allowlist import AllowList
from rallypoint.rpc.serialization.cuda_ipc import LEAST, Block, Way, decide, visible_names, way_to
from rallypoint.rpc.serialization.payload import dumps, loads, unsent
from rallypoint.rpc.serialization.tensor_writer import Devices, TensorWriter


# -- which way --------------------------------------------------------------------------------------

CUDA0, CUDA1, CPU = Device("cuda", 0), Device("cuda", 1), Device("cpu")


def way(device: Device = CUDA0, target: Device = CUDA1, nbytes: int = LEAST, **options: Any) -> Way:
    given = {
        "own": False,
        "shares_memory": True,
        "enabled": True,
        "ours": ("/0", "/1"),
        "theirs": ("/0", "/1"),
        **options,
    }
    return decide(device, target, nbytes, **given)


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        (Way.SHARED, {}),
        (Way.SHARED, {"device": CUDA1, "target": CUDA0}),
        (Way.SHARED, {"theirs": ("/3", "/0")}),  # it numbers them differently
        (Way.HANDED, {"own": True}),
        (Way.HANDED, {"own": True, "enabled": False, "ours": (), "nbytes": 1}),
        (Way.STAGED, {"own": True, "target": CPU}),
        (Way.STAGED, {"shares_memory": False}),
        (Way.STAGED, {"target": CPU}),
        (Way.STAGED, {"device": Device("xpu", 0), "target": Device("xpu", 0)}),
        (Way.STAGED, {"nbytes": LEAST - 1}),
        (Way.STAGED, {"enabled": False}),
        (Way.STAGED, {"theirs": ()}),
        (Way.STAGED, {"theirs": ("/1",)}),  # it does not see ours
        (Way.STAGED, {"ours": ()}),
        (Way.STAGED, {"device": CUDA1, "ours": ("/0",)}),
        (Way.STAGED, {"ours": ("/MIG-1",), "theirs": ("/MIG-1",)}),
        (Way.STAGED, {"ours": ("PCI_BUS_ID/0",)}),  # its 0 may be another device
    ],
)
def test_the_way_of_a_tensor(expected, options):
    assert way(**options) is expected


@pytest.mark.parametrize(
    ("count", "setting", "order", "names"),
    [
        (2, None, None, ("/0", "/1")),
        (2, "3,1", None, ("/3", "/1")),
        (1, "3, 9", "PCI_BUS_ID", ("PCI_BUS_ID/3",)),
        (1, "GPU-ab", None, ("/GPU-ab",)),
        (2, "3", None, ()),  # this does not say which the second one is
        (0, "", None, ()),
    ],
)
def test_what_gpus_are_called_by_all_processes_of_a_host(count, setting, order, names):
    assert visible_names(count, setting, order) == names


def member(name: str, **more: Any) -> Member:
    facts: dict[str, Any] = {
        "id": 0,
        "incarnation": name.encode().hex() * 8,
        "host": "one",
        "addresses": {"memory": "m", "uds": "u", "tcp": ("h", 1)},
        "devices": NodeDevices(counts={"cuda": 1}, visible=("/0",)),
    }
    return Member(name=name, **{**facts, **more})


@pytest.mark.parametrize(
    ("peer", "transports", "expected"),
    [
        (member("b"), ("memory", "uds", "tcp"), Way.SHARED),
        (member("a"), ("memory", "uds", "tcp"), Way.HANDED),
        (member("a"), ("uds", "tcp"), Way.HANDED),  # CUDA does not open a block of its own process
        (member("b"), ("tcp",), Way.STAGED),
        (member("b", host="two"), ("memory", "uds", "tcp"), Way.STAGED),
        (member("b", addresses={"tcp": ("h", 1)}), ("memory", "uds", "tcp"), Way.STAGED),
        (member("b", devices=NodeDevices()), ("memory", "uds", "tcp"), Way.STAGED),
    ],
)
def test_the_way_to_a_worker_is_that_of_the_connection(peer, transports, expected):
    found = way_to(member("a"), peer, transports, enabled=True)
    assert found(torch.device("cuda:0"), "cuda:0", LEAST) is expected


def test_what_a_worker_sees_is_in_its_record():
    assert Member.decode(member("a").encode()) == member("a")


# -- memory that stands in for a GPU's --------------------------------------------------------------


class FakeMemory:
    """Passes tensors of this process on by a handle; counts as torch does, and records what was done."""

    kinds = frozenset({"cpu"})

    def __init__(self) -> None:
        self.blocks: dict[bytes, Tensor] = {}
        self.counters: dict[int, int] = {}
        self.log: list[str] = []
        self.refuses = self.is_blind = self.fails = False
        self._numbers = itertools.count(5)

    def stage(self, flat: Tensor) -> Tensor:
        self.log.append("stage")
        return flat.clone()

    def share(self, flat: Tensor) -> Block:
        self.log.append("share")
        if self.refuses:
            raise RuntimeError("expandable segments")
        number = next(self._numbers)
        self.blocks[b"handle%d" % number] = flat
        self.counters[number] = 1
        return Block("gpu", b"handle%d" % number, flat.nbytes, 0, b"/torch_1_2", number, b"", False)

    def find(self, gpu: str) -> tuple[int, int] | None:
        return None if self.is_blind else (0, 1 << 30)

    def open(self, index: int, block: Block) -> Tensor:
        self.log.append("open")
        if self.fails:
            raise RuntimeError("invalid device context")
        self.counters[block.counter_offset] -= 1
        return self.blocks[block.handle]

    def copy(self, flat: Tensor, target: torch.device) -> Tensor:
        self.log.append("copy")
        return flat.clone()

    def give_up(self, block: Block) -> None:
        self.log.append("give up")
        self.counters[block.counter_offset] -= 1

    @property
    def is_all_counted_down_once(self) -> bool:
        return not any(self.counters.values()) and not cuda_ipc._handed


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of 100 elements and more are treated as on a GPU."""
    made = FakeMemory()
    monkeypatch.setattr(cuda_ipc, "memory", made)
    monkeypatch.setattr(cuda_ipc, "_counted", type(cuda_ipc._counted)(maxlen=100))
    reduce = TensorWriter.reduce

    def reduce_as_elsewhere(self, tensor):
        elsewhere = tensor.dtype is not torch.uint8 and tensor.layout is torch.strided
        return self._reduce_elsewhere(tensor) if elsewhere else reduce(self, tensor)

    monkeypatch.setattr(TensorWriter, "reduce", reduce_as_elsewhere)
    return made


def send(obj: Any, by: Way = Way.SHARED, **options: Any) -> tuple[bytes, TensorWriter]:
    return dumps(obj, devices=Devices(lambda _: "cpu", lambda *_: by), **options)


def arrive(message: tuple[bytes, TensorWriter], **options: Any) -> Any:
    data, writer = message
    return loads(data, [bytearray(each) for each in writer.buffers], **options)


WAYS = pytest.mark.parametrize("by", list(Way))

BASE = torch.arange(10_000.0)
VIEWS = {
    "whole": BASE,
    "scalar": torch.tensor(3.0),
    "transposed": BASE.view(100, 100).t(),
    "rows": BASE.view(100, 100)[50:],
    "few rows": BASE.view(100, 100)[3:5],
    "column": BASE.view(100, 100)[:, 3],
    "far apart": BASE.view(10, 10, 100)[:, 2:4, ::50],
    "one element": BASE[77],
    "expanded": torch.arange(3.0).expand(4, 3),
    "expanded with gaps": BASE[::1000].expand(3, 10),
    "empty": torch.empty(0, 3),
    "empty view": BASE[5:5],
    "bf16": torch.arange(300).to(torch.bfloat16),
    "fp8": torch.arange(300.0).to(torch.float8_e4m3fn),
    "complex": torch.randn(200, dtype=torch.complex64),
    "bool": BASE > 3,
    "conjugate": torch.randn(200, dtype=torch.complex64).conj(),
}


@WAYS
@pytest.mark.parametrize("name", VIEWS)
def test_views_and_values_arrive_on_every_way(gpu, by, name):
    tensor = VIEWS[name]
    found = arrive(send(tensor, by))
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    bits = {1: torch.uint8}.get(tensor.element_size())
    plain = tensor.resolve_conj()
    assert torch.equal(found.view(bits), plain.view(bits)) if bits else torch.equal(found, plain)
    if name != "expanded with gaps":  # packed: elements that shared memory are apart then
        steps = zip(found.stride(), tensor.stride(), tensor.shape, strict=True)
        assert all(a == b for a, b, size in steps if size > 1)
    assert gpu.is_all_counted_down_once
    assert not found.numel() or ({"open", "share"} <= set(gpu.log)) == (by is Way.SHARED)


@WAYS
def test_the_sender_may_overwrite_what_it_has_sent(gpu, by):
    tensor = torch.ones(1000)
    message = send([tensor, tensor[:3]], by)
    if by is Way.STAGED:
        message = message[0], [bytes(each) for each in message[1].buffers]
        message = message[0], type("Sent", (), {"buffers": message[1]})
    tensor.zero_()
    whole, part = arrive(message)
    assert whole.sum() == 1000
    assert part.sum() == 3
    whole.fill_(7)
    assert tensor.sum() == 0


@WAYS
def test_what_shares_memory_is_sent_once_and_shares_it_over_there(gpu, by):
    tensor = torch.zeros(100, 100)
    whole, turned, again = arrive(send([tensor, tensor.t(), tensor], by))
    whole[2, 3] = 5
    assert turned[3, 2] == 5
    assert again is whole
    assert gpu.log.count({Way.SHARED: "share", Way.STAGED: "stage", Way.HANDED: "copy"}[by]) == 1
    assert gpu.is_all_counted_down_once


@WAYS
def test_a_small_part_does_not_take_its_memory_along(gpu, by):
    data, writer = send(BASE[10:20], by)
    sizes = [each.nbytes for each in [*gpu.blocks.values(), *cuda_ipc._handed.values()]]
    assert len(data) + sum(sizes) + sum(each.nbytes for each in writer.buffers) < 1000
    assert arrive((data, writer)).tolist() == BASE[10:20].tolist()


@WAYS
def test_gradients_parameters_and_modules_arrive(gpu, by):
    grad, parameter, layer = arrive(
        send([BASE.clone().requires_grad_(), torch.nn.Parameter(BASE), torch.nn.Linear(30, 20)], by)
    )
    assert grad.requires_grad
    assert type(parameter) is torch.nn.Parameter
    assert layer(torch.ones(30)).shape == (20,)
    assert gpu.is_all_counted_down_once


@WAYS
@pytest.mark.parametrize("by_value", [False, True])
def test_tensors_need_no_entry_on_an_allow_list(gpu, by, by_value):
    found = arrive(send({"a": BASE, "b": BASE[::3]}, by, by_value=by_value), allowed=AllowList([]))
    assert torch.equal(found["b"], BASE[::3])


# -- what goes wrong --------------------------------------------------------------------------------


def test_memory_that_cannot_be_shared_is_staged(gpu, caplog):
    gpu.refuses = True
    data, writer = send(BASE)
    assert gpu.log == ["share", "stage"]
    assert not writer.parcels
    assert "goes through pinned memory: expandable segments" in caplog.text
    assert torch.equal(arrive((data, writer)), BASE)


def test_a_block_that_cannot_be_opened_names_the_option_and_is_given_up(gpu):
    for name, words in (
        ("is_blind", "on GPU gpu, which this process cannot see"),
        ("fails", "invalid device context"),
    ):
        message = send([BASE, BASE.clone()])
        setattr(gpu, name, True)
        with pytest.raises(RpcError, match=f"{words}.*cuda_ipc=False"):
            arrive(message)
        setattr(gpu, name, False)
        assert gpu.is_all_counted_down_once


class Missing:
    def __reduce__(self):
        return missing, ()


def missing():
    raise LookupError("it is not made here")


@pytest.mark.parametrize("by", [Way.SHARED, Way.HANDED])
@pytest.mark.parametrize("allowed", [None, AllowList([])])
def test_what_a_message_that_fails_in_the_middle_did_not_reach_is_given_up(gpu, by, allowed):
    for content in (
        [Missing(), BASE],
        [BASE, Missing(), BASE.clone(), {"a": (BASE[::3], {1, 2})}],
        [Missing(), torch.nn.Linear(30, 20), torch.nn.Parameter(BASE)],
        [BASE, BASE.clone(), Missing()],
    ):
        with pytest.raises((LookupError, NotAllowed)):
            arrive(send(content, by), allowed=allowed)
        assert gpu.is_all_counted_down_once


@pytest.mark.parametrize("by", [Way.SHARED, Way.HANDED])
def test_a_message_that_does_not_leave_takes_its_blocks_back(gpu, by):
    _, writer = send([BASE, BASE[::3]], by)
    assert len(writer.parcels) == 2
    unsent(writer)
    unsent(writer)
    assert gpu.is_all_counted_down_once
    with pytest.raises((AttributeError, TypeError)):
        send([BASE, iter(lambda: 1, 2)], by)
    assert gpu.is_all_counted_down_once


def test_a_message_is_marked_where_it_must_be_read(gpu):
    assert not send([1, BASE], Way.STAGED)[1].parcels
    assert len(send([1, BASE, BASE.t()], Way.SHARED)[1].parcels) == 1


GOOD = Block("gpu", b"handle5", 400, 0, b"/torch_1_2_3", 7, b"", False)


@pytest.mark.parametrize(
    "bad",
    [
        {"handle": b""},
        {"handle": "handle5"},
        {"handle": bytes(1 << 17)},
        {"size": 0},
        {"size": -1},
        {"size": True},
        {"size": 1 << 40},
        {"offset": -8},
        {"offset": 1 << 40},
        {"counter": b"/etc/passwd"},
        {"counter": b"/torch_1/../x"},
        {"counter": "/torch_1"},
        {"counter_offset": -1},
        {"counter_offset": 10_000},
        {"event": b"short", "waits": True},
        {"waits": 1},
        {"gpu": None},
    ],
    ids=str,
)
def test_a_description_is_checked_before_it_is_used(gpu, bad):
    with pytest.raises(RpcError, match="invalid description|the GPU has"):
        cuda_ipc.arrive_shared("cpu", *GOOD._replace(**bad))
    assert "open" not in gpu.log
    with pytest.raises(RpcError, match="expected a device"):
        cuda_ipc.arrive_shared("meta", *GOOD)
    with pytest.raises(TypeError):
        cuda_ipc.arrive_shared("cpu", *GOOD[:-1])
    data = pickle.dumps(bad)
    cuda_ipc.salvage(data + b"arrive_shared")
    assert "give up" not in gpu.log


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((11,), (1,), 0),
        ((10,), (1,), 1),
        ((2, 6), (5, 1), 0),
        ((2,), (-1,), 5),
        ((-1,), (1,), 0),
        ((2,), (1, 1), 0),
        ((2,), (1,), -1),
        ((2.0,), (1,), 0),
        ((2,), (1 << 62,), 0),
    ],
)
def test_a_view_stays_in_its_memory(size, stride, offset):
    flat = torch.zeros(40, dtype=torch.uint8)
    with pytest.raises(RpcError, match="received a tensor with shape"):
        cuda_ipc.view(flat, torch.float32, size, stride, offset)
    assert flat.untyped_storage().nbytes() == 40
    assert cuda_ipc.view(flat, torch.float32, (2, 5), (5, 1), 0).shape == (2, 5)


def test_a_number_that_nobody_has_handed_over_is_refused():
    with pytest.raises(RpcError, match="taken already"):
        cuda_ipc.arrive_handed(-1)


# -- torch's own ------------------------------------------------------------------------------------

# As torch returns it: the device, and the rest.
SHARED = (3, b"handle", 400, 512, b"/torch_1_2_0", 7, bytes(64), True)


class Asked(Exception):
    pass


class Storage:
    """Records what it was asked for."""

    device = torch.device("cuda", 3)

    def _share_cuda_(self) -> Any:
        return SHARED

    @classmethod
    def _new_shared_cuda(cls, *args: Any) -> Any:
        raise Asked(args)


class Flat:
    device = torch.device("cuda", 3)

    def untyped_storage(self) -> Any:
        return Storage()


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    properties = [types.SimpleNamespace(uuid=f"gpu{i}", total_memory=80 << 30) for i in range(4)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties[i])
    monkeypatch.setattr(torch, "UntypedStorage", Storage)
    return cuda_ipc.CudaMemory()


def test_torch_is_asked_as_torch_itself_asks(cuda):
    block = cuda.share(Flat())
    assert block == Block("gpu3", b"handle", 400, 512, b"/torch_1_2_0", 7, bytes(64), True)
    cuda_ipc._check_block(block)
    assert cuda.find("gpu3") == (3, 80 << 30)
    assert cuda.find("gpu9") is None
    with pytest.raises(Asked) as ours:
        cuda.open(2, block)
    # What multiprocessing does with the same values.
    _, handle, size, offset, counter, counter_offset, event, waits = SHARED
    with pytest.raises(Asked) as theirs:
        reductions.rebuild_cuda_tensor(
            *(Tensor, (100,), (1,), 0, Storage, torch.float32, 2, handle, size, offset),
            *(False, counter, counter_offset, event, waits),
        )
    assert ours.value.args == theirs.value.args


def test_torch_says_in_this_order_what_it_has_shared(monkeypatch):
    """If another version of torch returns more, or less, this must be reviewed."""
    typed = types.SimpleNamespace(
        _untyped_storage=Storage(), _share_cuda_=Storage()._share_cuda_, __weakref__=None
    )
    monkeypatch.setattr(reductions, "StorageWeakRef", lambda _: None)
    monkeypatch.setattr(reductions, "shared_cache", {})
    monkeypatch.setattr(torch.utils.hooks, "warn_if_has_hooks", lambda _: None)
    tensor = torch.ones(3)
    monkeypatch.setattr(Tensor, "_typed_storage", lambda _: typed)
    _, given = reductions.reduce_tensor(tensor)
    device, handle, size, offset, counter, counter_offset, event, waits = SHARED
    assert given[6:10] == (device, handle, size, offset)
    assert given[11:] == (counter, counter_offset, event, waits)
    assert all(hasattr(torch.UntypedStorage, name) for name in ("_release_ipc_counter_cuda",))
