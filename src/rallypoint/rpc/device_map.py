"""Which device of a node stands for which device of another: checked before the first call, pure.

A tensor on a device of the caller arrives on the device that the caller's map for that node names; what comes
back follows the map backwards. So a map is one to one, and both ends must have the devices that it names.

The first line of each message is torch's own, word for word: code and tests that look for it find it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from rallypoint.errors import ConfigError


@dataclass(frozen=True, order=True, slots=True)
class Device:
    """As torch writes it: ``cuda:1``, ``cpu``.

    Args:
        kind: ``cpu``, ``cuda``, or another accelerator's name.
        index: which of its kind; the CPU is one.
    """

    kind: str
    index: int = 0

    @classmethod
    def parse(cls, value: object) -> Self:
        """A torch.device, its text, or the number of a CUDA device.

        Raises:
            ConfigError: it is none of these.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            value = f"cuda:{value}"
        kind, colon, index = str(value).partition(":")
        digits = index.isascii() and index.isdigit()
        if (
            not (kind.isidentifier() and kind.islower())
            or (colon and not digits)
            or (kind == "cpu" and int(index or 0))
        ):
            raise ConfigError(
                "device", value, "expected a device as 'cuda:0' or 'cpu', or a CUDA device's number"
            )
        return cls(kind, int(index or 0))

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


Map = Mapping[Device, Device]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDevices:
    """What a node tells the others about its devices.

    Args:
        counts: how many it has of each kind; the CPU need not be listed.
        devices: those that it uses for calls; empty: all that maps name.
        maps: for each node that it calls, own devices to that node's.
        visible: what its GPUs are called by all processes of its host; empty: it opens nobody's memory.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    maps: Mapping[str, Map] = field(default_factory=dict)
    visible: tuple[str, ...] = ()

    def lacks(self, devices: Iterable[Device]) -> bool:
        """Whether it does not have all of ``devices``."""
        return any(each.kind != "cpu" and each.index >= self._count(each) for each in devices)

    def _count(self, device: Device) -> int:
        return self.counts.get(device.kind, 0)


def find_problem(nodes: Mapping[str, NodeDevices], *, static: bool = True) -> str | None:
    """What is wrong with the maps of a group, or None. Every node that knows all of them finds the same.

    Args:
        nodes: by name.
        static: all members are known; else a map may name a node that has not joined yet.
    """
    for name, node in nodes.items():
        if len(set(node.devices)) < len(node.devices):
            return f"Node {name} has duplicated devices\n{_devices(node)}"
        if node.lacks(node.devices):
            return (
                f"Node {name} has devices with invalid indices\n{_devices(node)}\n{_counts(node)}"
            )
    for name, node in nodes.items():
        unknown = sorted(node.maps.keys() - nodes.keys())
        if static and unknown:
            return (
                f"Node {name} has invalid target node names in its device maps\n"
                f"device maps for {', '.join(unknown)}; node names = {', '.join(nodes)}"
            )
        for target, device_map in node.maps.items():
            problem = _problem_of_map(node, nodes.get(target), device_map)
            if problem is not None:
                fault, facts = problem
                return (
                    f"Node {name} has {fault} in its device map for {target}\n"
                    f"device map = {_shown(device_map)}{facts}"
                )
    return None


def _problem_of_map(
    node: NodeDevices, target: NodeDevices | None, device_map: Map
) -> tuple[str, str] | None:
    """The fault, and what it contradicts."""
    if len(set(device_map.values())) < len(device_map):
        return "duplicated target devices", ""
    ends: list[tuple[str, NodeDevices, Collection[Device]]] = [("source", node, device_map.keys())]
    if target is not None:
        ends.append(("target", target, device_map.values()))
    for end, owner, devices in ends:
        if owner.devices and not set(devices) <= set(owner.devices):
            return f"unexpected {end} devices", f"\n{_devices(owner)}"
        if not owner.devices and owner.lacks(devices):
            return f"{end} devices with invalid indices", f"\n{_counts(owner)}"
    return None


def reverse_maps(name: str, nodes: Mapping[str, NodeDevices]) -> dict[str, dict[Device, Device]]:
    """By which maps replies of node ``name`` travel back, for each of ``nodes`` that may call it."""
    return {
        caller: {theirs: own for own, theirs in node.maps[name].items()}
        for caller, node in nodes.items()
        if name in node.maps
    }


def device_list(node: NodeDevices, reverse: Mapping[str, Map]) -> tuple[Device, ...]:
    """The devices that a node's agent uses: those it said, else all that its maps and the ``reverse`` ones name; not the CPU."""
    if node.devices:
        return tuple(sorted(node.devices))
    named = {each for device_map in (*node.maps.values(), *reverse.values()) for each in device_map}
    return tuple(sorted(each for each in named if each.kind != "cpu"))


def _devices(node: NodeDevices) -> str:
    return f"devices = {', '.join(map(str, node.devices))}"


def _counts(node: NodeDevices) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in node.counts.items()) or "none"
    return f"device count = {kinds}"


def _shown(device_map: Map) -> str:
    return "{" + ", ".join(f"{own}: {theirs}" for own, theirs in device_map.items()) + "}"
