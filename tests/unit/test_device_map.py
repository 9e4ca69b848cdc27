"""Device maps: exact messages, and torch's own verdict on the same maps."""

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.rpc import Device, NodeDevices, device_list, find_problem, reverse_maps


def cuda(index: int) -> Device:
    return Device("cuda", index)


def node(count: int = 2, devices: str = "", **maps: str) -> NodeDevices:
    """``node(2, "01", b="0>1 1>0")``: devices by their numbers, ``c`` for the CPU."""

    def one(text: str) -> Device:
        return Device("cpu") if text == "c" else cuda(int(text))

    return NodeDevices(
        counts={"cuda": count},
        devices=tuple(map(one, devices)),
        maps={
            target: {one(a): one(b) for a, b in (pair.split(">") for pair in pairs.split())}
            for target, pairs in maps.items()
        },
    )


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"a": node(devices="00")}, "Node a has duplicated devices\ndevices = cuda:0, cuda:0"),
        (
            {"a": node(2, "03")},
            "Node a has devices with invalid indices\ndevices = cuda:0, cuda:3\ndevice count = 2 cuda",
        ),
        (
            {"a": node(x="0>0"), "b": node()},
            "Node a has invalid target node names in its device maps\n"
            "device maps for x; node names = a, b",
        ),
        (
            {"a": node(b="0>1 1>1"), "b": node()},
            "Node a has duplicated target devices in its device map for b\n"
            "device map = {cuda:0: cuda:1, cuda:1: cuda:1}",
        ),
        (
            {"a": node(2, "0", b="1>0"), "b": node()},
            "Node a has unexpected source devices in its device map for b\n"
            "device map = {cuda:1: cuda:0}\ndevices = cuda:0",
        ),
        (
            {"a": node(1, b="1>0"), "b": node()},
            "Node a has source devices with invalid indices in its device map for b\n"
            "device map = {cuda:1: cuda:0}\ndevice count = 1 cuda",
        ),
        (
            {"a": node(b="0>1"), "b": node(2, "0")},
            "Node a has unexpected target devices in its device map for b\n"
            "device map = {cuda:0: cuda:1}\ndevices = cuda:0",
        ),
        (
            {"a": node(b="0>1"), "b": node(1)},
            "Node a has target devices with invalid indices in its device map for b\n"
            "device map = {cuda:0: cuda:1}\ndevice count = 1 cuda",
        ),
        ({"a": node(b="0>1 c>c"), "b": node(a="1>c")}, None),
        ({"a": node(0, b="c>c"), "b": node(0)}, None),
    ],
)
def test_every_fault_has_its_message(nodes: dict[str, NodeDevices], message: str | None) -> None:
    assert find_problem(nodes) == message


def test_a_dynamic_group_may_name_a_node_that_has_not_joined() -> None:
    nodes = {"a": node(x="0>7")}
    assert "invalid target node names" in str(find_problem(nodes))
    assert find_problem(nodes, static=False) is None
    assert "source devices" in str(find_problem({"a": node(x="7>0")}, static=False))


def test_replies_travel_back_and_devices_are_those_that_maps_name() -> None:
    nodes = {"a": node(b="0>1 c>c"), "b": node(c="1>0"), "c": node(2, "10", b="0>0")}
    back = reverse_maps("b", nodes)
    assert back == {"a": {cuda(1): cuda(0), Device("cpu"): Device("cpu")}, "c": {cuda(0): cuda(0)}}
    assert device_list(nodes["b"], back) == (cuda(0), cuda(1))
    assert device_list(nodes["a"], {}) == (cuda(0),)
    assert device_list(nodes["c"], reverse_maps("c", nodes)) == (cuda(0), cuda(1))


@pytest.mark.parametrize(
    ("value", "text"),
    [("cuda:3", "cuda:3"), ("cuda", "cuda:0"), ("cpu", "cpu"), (2, "cuda:2"), ("cpu:0", "cpu")],
)
def test_devices_are_read_as_torch_writes_them(value: object, text: str) -> None:
    assert str(Device.parse(value)) == text
    assert str(Device.parse(torch.device(text))) == text


@pytest.mark.parametrize(
    "value", ["", "cuda:", "cuda:x", "cpu:1", True, None, "cuda:-1", 1.5, "a b"]
)
def test_what_is_no_device(value: object) -> None:
    with pytest.raises(ConfigError, match="expected a device such as"):
        Device.parse(value)


devices = st.sampled_from([Device("cpu"), *map(cuda, range(3))])
names = st.sampled_from("abx")
one_node = st.builds(
    NodeDevices,
    counts=st.integers(0, 3).map(lambda n: {"cuda": n}),
    devices=st.lists(devices.filter(lambda d: d.kind == "cuda"), max_size=3).map(tuple),
    maps=st.dictionaries(names, st.dictionaries(devices, devices, max_size=3), max_size=2),
)


@given(st.fixed_dictionaries({"a": one_node, "b": one_node}), st.booleans())
def test_torch_finds_the_same_fault(nodes: dict[str, NodeDevices], static: bool) -> None:
    from torch.distributed.rpc import backend_registry

    def torchs(device: Device) -> torch.device:
        return torch.device(str(device))

    try:
        backend_registry._validate_device_maps(
            list(nodes),
            {name: each.counts["cuda"] for name, each in nodes.items()},
            {
                name: {
                    to: {torchs(k): torchs(v) for k, v in m.items()} for to, m in each.maps.items()
                }
                for name, each in nodes.items()
            },
            {name: [torchs(d) for d in each.devices] for name, each in nodes.items()},
            static,
        )
        expected = None
    except ValueError as error:
        expected = str(error).splitlines()[0]
    found = find_problem(nodes, static=static)
    assert (None if found is None else found.splitlines()[0]) == expected
    if expected is None:
        for name in nodes:
            theirs = backend_registry._create_reverse_mapping(
                name,
                list(nodes),
                {
                    n: {
                        to: {torchs(k): torchs(v) for k, v in m.items()}
                        for to, m in each.maps.items()
                    }
                    for n, each in nodes.items()
                },
            )
            ours = {
                to: {torchs(k): torchs(v) for k, v in m.items()}
                for to, m in reverse_maps(name, nodes).items()
            }
            assert ours == theirs
