"""Reads what :mod:`rallypoint.launch.placement.numa` needs to decide: CPUs, caches and GPUs, from /sys and /proc.

Reading files needs neither numactl nor a driver nor torch, so the supervisor can do it, once, before
it starts a worker, and a mistake is reported once and not by every worker.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rallypoint.errors import ConfigError
from rallypoint.launch.placement.numa import Cpu, Topology, parse_cpus, visible_devices


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_T = TypeVar("_T")

_NVIDIA, _AMD = 0x10DE, 0x1002
# PCI base classes: 0x03 display controllers; 0x12 processing accelerators, which is what MI300 calls
# itself. NVSwitches, network cards and a GPU's own audio function have others.
_DISPLAY, _ACCELERATOR = 0x03, 0x12

# Applied one after the other: each selects from what the one before left.
_VISIBILITY: Mapping[int, tuple[tuple[str, ...], ...]] = {
    _NVIDIA: (("CUDA_VISIBLE_DEVICES",),),
    _AMD: (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
}


def read_topology(
    sys_root: Path = Path("/sys"),
    *,
    proc_root: Path = Path("/proc"),
    allowed: frozenset[int] | None = None,
    env: Mapping[str, str] | None = None,
) -> Topology:
    """Describe this machine for :func:`rallypoint.launch.placement.numa.choose_cpus`.

    Devices are in PCI order, which is CUDA's own where all GPUs are alike; where they are not, set
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

    Args:
        sys_root: where sysfs is.
        proc_root: where procfs is; NVIDIA's driver lists there which GPUs a container may use, while
            /sys shows it all of the host's.
        allowed: CPUs the workers may run on; those of this process if None.
        env: where to look for ``CUDA_VISIBLE_DEVICES`` and its AMD relatives.

    Raises:
        ConfigError: something needed cannot be read; names the file.
    """
    cpus = _read_cpus(sys_root / "devices/system")
    return Topology(
        cpus=cpus,
        allowed=frozenset(os.sched_getaffinity(0)) if allowed is None else allowed,
        device_nodes=_read_device_nodes(sys_root, proc_root, env or {}),
    )


def num_devices(env: Mapping[str, str]) -> int:
    """How many GPUs this process sees, without asking their driver; 0 if none can be found this way.

    Args:
        env: where to look for ``CUDA_VISIBLE_DEVICES`` and its AMD relatives.
    """
    try:
        return len(_read_device_nodes(Path("/sys"), Path("/proc"), env))
    except ConfigError:
        return 0


# ---- CPUs --------------------------------------------------------------------------------------


def _read_cpus(system: Path) -> tuple[Cpu, ...]:
    online = sorted(_parsed(system / "cpu/online", parse_cpus))
    if not online:
        raise _unreadable(system / "cpu/online", "it lists no CPU")
    node_of = _read_nodes(system, online)
    # CPUs come in families that share a core or a cache; one of them speaks for all.
    core_of: dict[int, int] = {}
    cache_of: dict[int, int | None] = {}
    cpus: list[Cpu] = []
    for index in online:
        folder = system / f"cpu/cpu{index}"
        if index not in node_of:
            raise _unreadable(system / "node/node*/cpulist", f"no node has CPU {index}")
        if index not in core_of:
            siblings = _parsed(folder / "topology/thread_siblings_list", parse_cpus) | {index}
            core_of.update(dict.fromkeys(siblings, min(siblings)))
        if index not in cache_of:
            sharers = _read_last_cache(folder / "cache")
            cache_of.update(dict.fromkeys(sharers | {index}, min(sharers, default=None)))
        cpus.append(
            Cpu(
                index=index,
                node=node_of[index],
                socket=_parsed(folder / "topology/physical_package_id", int),
                core=core_of[index],
                cache=cache_of[index],
            )
        )
    return tuple(cpus)


def _read_nodes(system: Path, online: list[int]) -> dict[int, int]:
    if not (system / "node").is_dir():
        return dict.fromkeys(online, 0)  # a kernel built without NUMA: one node
    node_of: dict[int, int] = {}
    for folder in (system / "node").glob("node[0-9]*"):
        node = int(folder.name.removeprefix("node"))
        # Memory-only nodes (HBM, CXL, a GPU's own) have an empty list.
        node_of.update(dict.fromkeys(_parsed(folder / "cpulist", parse_cpus), node))
    return node_of


def _read_last_cache(folder: Path) -> frozenset[int]:
    """The CPUs that share the cache farthest from the core; empty if none is described.

    That is L3 where there is one. Virtual machines often describe no cache at all, which matters to
    one mode only, so it is not an error here.
    """
    farthest, sharers = 0, frozenset[int]()
    for index in sorted(folder.glob("index[0-9]*")):
        try:
            level = _parsed(index / "level", int)
            if level <= farthest or _read(index / "type") not in {"Unified", "Data"}:
                continue
            sharers = _parsed(index / "shared_cpu_list", parse_cpus)
        except ConfigError:
            continue  # some hypervisors leave files out
        farthest = level
    return sharers


# ---- GPUs --------------------------------------------------------------------------------------


def _read_device_nodes(
    sys_root: Path, proc_root: Path, env: Mapping[str, str]
) -> tuple[int | None, ...]:
    by_vendor: dict[int, list[Path]] = {_NVIDIA: [], _AMD: []}
    # Absent in some sandboxes and virtual machines: no PCI, no GPU.
    for device in sorted((sys_root / "bus/pci/devices").glob("*"), key=_pci_address):
        try:
            vendor = int(_read(device / "vendor"), 16)
            base_class = int(_read(device / "class"), 16) >> 16
        except (ConfigError, ValueError):
            continue  # not a device we could name
        if base_class == _DISPLAY or (base_class == _ACCELERATOR and vendor == _AMD):
            by_vendor.get(vendor, []).append(device)
    # Both: an AMD processor's built-in graphics beside NVIDIA cards, which do the computing.
    vendor = _NVIDIA if by_vendor[_NVIDIA] else _AMD
    devices = by_vendor[vendor]
    uuids: list[str | None] = [None] * len(devices)
    if vendor == _NVIDIA:
        devices, uuids = _drivable(devices, proc_root)
    chosen: tuple[int | None, ...] = tuple(range(len(devices)))
    for names in _VISIBILITY[vendor]:
        setting = next((env[name] for name in names if name in env), None)
        left = [None if index is None else uuids[index] for index in chosen]
        chosen = tuple(None if i is None else chosen[i] for i in visible_devices(setting, left))
    return tuple(None if index is None else _device_node(devices[index]) for index in chosen)


def _drivable(devices: list[Path], proc_root: Path) -> tuple[list[Path], list[str | None]]:
    """The devices NVIDIA's driver offers to this process, and their UUIDs."""
    listing = proc_root / "driver/nvidia/gpus"
    if not listing.is_dir():
        return devices, [None] * len(devices)
    offered: dict[str, str | None] = {}
    for folder in listing.iterdir():
        offered[folder.name.lower()] = None
        try:
            lines = _read(folder / "information").splitlines()
        except ConfigError:
            continue
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "GPU UUID":
                offered[folder.name.lower()] = value.strip()
    kept = [device for device in devices if device.name.lower() in offered]
    return kept, [offered[device.name.lower()] for device in kept]


def _pci_address(device: Path) -> tuple[int, ...]:
    """``0000:dc:00.0`` as numbers: domains may have more than four digits, and text sorts wrong."""
    try:
        return tuple(int(part, 16) for part in device.name.replace(".", ":").split(":"))
    except ValueError:
        return ()


def _device_node(device: Path) -> int | None:
    if not (device / "numa_node").exists():
        return None  # a kernel built without NUMA
    node = _parsed(device / "numa_node", int)
    return None if node < 0 else node  # -1: the firmware did not say


# ---- files -------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def _parsed(path: Path, parse: Callable[[str], _T]) -> _T:
    text = _read(path)
    try:
        return parse(text)
    except ValueError as error:
        raise _unreadable(path, f"it says {text!r}") from error


def _unreadable(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        "--numa-binding",
        None,
        f"the machine's topology cannot be read: {path}: {problem}",
        "leave out --numa-binding here",
    )
