"""An allow-list holds against messages that are made to get around it."""

from __future__ import annotations

import io
import os  # a message may try to reach it through this module
import pickle
from collections import OrderedDict
from os import getpid  # or this, which is not this module's own

import pytest
import torch

from rallypoint.errors import NotAllowed
from rallypoint.rpc.serialization import payload
from rallypoint.rpc.serialization.allowlist import AllowList


HERE = __name__


class Outer:
    class Inner:
        pass

    def __init__(self, value=1):
        self.value = value

    def double(self):
        return 2 * self.value

    def _private(self):
        return self.value


def function():
    return os.sep, getpid


def say(module, name, args):
    """A message that calls what it names, as a peer that knows the format could write it."""

    def text(value):
        data = value.encode()
        return b"\x8c" + bytes([len(data)]) + data

    arguments = pickle.dumps(args, 4)[2:-1]
    if arguments[:1] == b"\x95":  # the frame's length
        arguments = arguments[9:]
    return b"\x80\x04" + text(module) + text(name) + b"\x93" + arguments + b"R."


class Exploit:
    def __reduce__(self):
        return os.getpid, ()


def saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        ("os", "getpid", ()),
        ("posix", "getpid", ()),
        (HERE, "os.getpid", ()),
        (HERE, "getpid", ()),
        (HERE, "function.__globals__.get", ("os",)),
        (HERE, "Outer.__subclasses__", ()),
        ("builtins", "eval", ("1",)),
        ("builtins", "getattr", (Outer, "__subclasses__")),
        ("builtins", "getattr", (Outer(), "_private")),
        ("builtins", "getattr", ({}, "get")),
        ("rallypoint.rpc.serialization.payload", "loads", (pickle.dumps(Exploit()),)),
        ("rallypoint.rpc.serialization.payload", "pickle.loads", (pickle.dumps(Exploit()),)),
        ("rallypoint.rpc.serialization.tensor_reader", "rebuild_saved", (saved(Exploit()),)),
        ("rallypoint.rpc.serialization.tensor_reader", "torch.load", ("x",)),
        ("rallypoint.rpc.serialization.script", "load_script_function", ("os", "getpid")),
        ("rallypoint.rpc.serialization.script", "importlib.import_module", ("os",)),
    ],
)
def test_no_way_leads_past_the_list(module, name, args):
    with pytest.raises(NotAllowed):
        payload.loads(say(module, name, args), allowed=AllowList([HERE]))


def test_what_is_listed_is_found():
    allowed = AllowList([HERE, "collections.OrderedDict", "torch.Size"])
    for value in (Outer.Inner, function, 3 + 4j, range(3), slice(1, 2), {1}, bytearray(b"x")):
        assert payload.loads(payload.dumps(value)[0], allowed=allowed) == value
    assert payload.loads(payload.dumps(Outer(4).double)[0], allowed=allowed)() == 8
    assert payload.loads(payload.dumps(OrderedDict(a=1))[0], allowed=allowed) == {"a": 1}
    assert payload.loads(payload.dumps(torch.Size([2]))[0], allowed=allowed) == (2,)
    with pytest.raises(
        NotAllowed, match="this worker does not allow torch.float32: add it, or its module 'torch'"
    ):
        payload.loads(payload.dumps(torch.float32)[0], allowed=allowed)


def test_a_package_on_the_list_has_what_its_modules_define():
    allowed = AllowList(["torch"])
    assert payload.loads(payload.dumps(torch.nn.Linear)[0], allowed=allowed) is torch.nn.Linear
    assert payload.loads(payload.dumps(torch.add)[0], allowed=allowed) is torch.add
    with pytest.raises(NotAllowed, match=r"torch.os.getpid"):
        payload.loads(say("torch", "os.getpid", ()), allowed=allowed)
    with pytest.raises(
        NotAllowed, match="or its module 'torchvision', to the option allowed_modules"
    ):
        payload.loads(say("torchvision", "x", ()), allowed=allowed)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3).to_sparse(),
        torch.empty(0),
    ],
    ids=["plain", "strided", "grad", "parameter", "sparse", "empty"],
)
def test_tensors_need_no_entry(tensor):
    data, writer = payload.dumps(tensor)
    buffers = [bytearray(each) for each in writer.buffers]
    found = payload.loads(data, buffers, allowed=AllowList([]))
    assert type(found) is type(tensor)
    assert found.requires_grad == tensor.requires_grad
    assert torch.equal(found.to_dense(), tensor.to_dense())
