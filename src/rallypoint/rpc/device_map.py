"""Device maps: which device of one worker corresponds to which device of another. Checked before the first call. Pure.

A tensor in a call arrives on the device that the caller's map for the callee assigns to the tensor's device. Results follow
the map in reverse. So a map must be one to one, and both workers must have the devices in it.

The first line of each error is exactly torch's, because programs and tests look for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from rallypoint.errors import ConfigError


@dataclass(frozen=True, order=True, slots=True)
class Device:
    """A device, written as in torch: ``cuda:1``, ``cpu``.

    Args:
        kind: ``cpu``, ``cuda``, or the name of another accelerator.
        index: its number among devices of this kind; 0 for the CPU.
    """

    kind: str
    index: int = 0

    @classmethod
    def parse(cls, value: object) -> Self:
        """Convert a device in any of torch's notations.

        Args:
            value: a ``torch.device``, its string, or the number of a CUDA device.

        Returns:
            The device.

        Raises:
            ConfigError: ``value`` is none of these.
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
                "device",
                value,
                "expected a device such as 'cuda:0' or 'cpu', or the number of a CUDA device",
            )
        return cls(kind, int(index or 0))

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


Map = Mapping[Device, Device]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDevices:
    """The devices of a worker, as the other workers know them.

    Args:
        counts: how many devices of each kind it has; the CPU need not be listed.
        devices: the devices that it uses for calls; empty: all that occur in device maps.
        maps: for each worker that it calls, its own devices mapped to that worker's.
        visible: names of its GPUs that are the same in all processes of its host; empty: it opens no GPU memory of other
            processes.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    maps: Mapping[str, Map] = field(default_factory=dict)
    visible: tuple[str, ...] = ()

    def lacks(self, devices: Iterable[Device]) -> bool:
        """Whether some devices do not exist on this worker.

        Args:
            devices: what to look for.

        Returns:
            True if at least one is missing.
        """
        return any(each.kind != "cpu" and each.index >= self._count(each) for each in devices)

    def _count(self, device: Device) -> int:
        return self.counts.get(device.kind, 0)


def find_problem(nodes: Mapping[str, NodeDevices], *, static: bool = True) -> str | None:
    """Check the device maps of a group. Every worker that knows all of them finds the same problem.

    Args:
        nodes: the devices of each worker, by its name.
        static: whether all members are known. If not, a map may name a worker that has not joined yet.

    Returns:
        The problem, in torch's words; None if the maps are valid.
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
    """The fault, and the facts that it contradicts."""
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
    """The maps that a worker's replies follow.

    Args:
        name: the worker that is called.
        nodes: the devices of each worker, by its name.

    Returns:
        For each caller that has a map for this worker, this worker's devices mapped to the caller's.
    """
    return {
        caller: {theirs: own for own, theirs in node.maps[name].items()}
        for caller, node in nodes.items()
        if name in node.maps
    }


def device_list(node: NodeDevices, reverse: Mapping[str, Map]) -> tuple[Device, ...]:
    """The devices that a worker uses for calls.

    Args:
        node: the worker's devices.
        reverse: the maps that its replies follow, from :func:`reverse_maps`.

    Returns:
        ``node.devices`` if any, else all devices that occur in the maps, without the CPU; sorted.
    """
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
