"""`--numa-binding`: which CPUs each worker of this machine is bound to.

Sans-I/O: :mod:`rallypoint.launch.placement.topology` reads the machine, this module decides, and the worker
binds itself (``sched_setaffinity``) before it runs anything.

    node          all CPUs of the worker's NUMA node
    socket        all CPUs of the socket that node is part of
    exclusive     the worker's own share of its node's physical cores; shares do not overlap
    core-complex  the cores behind one L3 cache of its node, a different one for each worker if
                  there are enough of them

Only CPUs this process may run on are ever handed out, so a cpuset of Slurm or Kubernetes holds.

[Note: a worker's NUMA node]
Worker `local_rank` uses the GPU of that index, so its node is that GPU's, as with torchrun, and the
cores of a node are shared out among *all* visible GPUs of the node, used by this job or not: what
a worker gets does not depend on how many others there are.

torchrun needs GPUs for this; here it also works without. Workers are then spread evenly over the
NUMA nodes, in rank order, so that neighbouring ranks are on one node: 8 workers on 2 nodes are
4 + 4, 2 workers on 4 nodes get the first and the third. "Evenly" counts the physical cores this
process may use: where a cpuset leaves 2 cores on node 0 and 6 on node 1, 4 workers are 1 + 3. The
same is done where it is unclear which GPUs the workers use: more workers than GPUs, a GPU whose node the
kernel does not know on a machine of several nodes, or MIG slices.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, assert_never, get_args

from rallypoint.errors import ConfigError


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


NumaBinding: TypeAlias = Literal["node", "socket", "exclusive", "core-complex"]
NUMA_BINDINGS: tuple[NumaBinding, ...] = get_args(NumaBinding)

_FLAG = "--numa-binding"

_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """One logical CPU (a hardware thread).

    Args:
        index: the kernel's number for it.
        node: its NUMA node.
        socket: its physical package.
        core: its physical core, named by the lowest CPU of that core.
        cache: the CPUs that share its last-level cache (L3, mostly), named by the lowest of them;
            None if the machine does not tell.
    """

    index: int
    node: int
    socket: int
    core: int
    cache: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """What matters about a machine for binding.

    Args:
        cpus: the CPUs that are online.
        allowed: those this process may run on.
        device_nodes: the NUMA node of each GPU that workers see, by its index for them; None where
            it is not known. Empty on a machine without GPUs.
    """

    cpus: tuple[Cpu, ...]
    allowed: frozenset[int]
    device_nodes: tuple[int | None, ...] = ()

    @property
    def usable(self) -> tuple[Cpu, ...]:
        """The CPUs that are online and allowed, in the order of their numbers."""
        return tuple(
            sorted((c for c in self.cpus if c.index in self.allowed), key=lambda cpu: cpu.index)
        )


def choose_cpus(
    mode: NumaBinding, topology: Topology, local_rank: int, local_world_size: int
) -> frozenset[int]:
    """The CPUs for one worker; never empty.

    Args:
        mode: see the module's docstring.
        topology: of this machine, as all its workers see it.
        local_rank: the worker's number on this machine, before ``--virtual-local-rank``.
        local_world_size: how many workers this machine has.

    Raises:
        ConfigError: the binding is impossible: no CPU of the GPU's node is allowed, more workers
            than cores to share exclusively, or caches the machine does not describe.
    """
    if not 0 <= local_rank < local_world_size:
        raise ConfigError(
            "local_rank", local_rank, f"expected 0 to {local_world_size - 1}, the workers here"
        )
    sharers = _nodes_of_sharers(mode, topology, local_world_size)
    node = sharers[local_rank]
    on_node = [cpu for cpu in topology.usable if cpu.node == node]
    if not on_node:
        raise ConfigError(
            _FLAG,
            mode,
            f"the GPU of local rank {local_rank} is on NUMA node {node}, but this process may only"
            f" run on CPUs {format_cpus(topology.allowed)}, none of which is there",
            "widen the cpuset of the job, or leave out --numa-binding",
        )
    peers = [rank for rank, other in enumerate(sharers) if other == node]
    turn, num_peers = peers.index(local_rank), len(peers)
    match mode:
        case "node":
            return _indices(on_node)
        case "socket":
            # A node can span sockets too (virtual machines without NUMA): then it is all of them.
            sockets = {cpu.socket for cpu in on_node}
            return _indices(cpu for cpu in topology.usable if cpu.socket in sockets)
        case "exclusive":
            return _exclusive_share(on_node, node, turn, num_peers)
        case "core-complex":
            return _core_complex(on_node, node, turn)
        case _:
            assert_never(mode)


def _nodes_of_sharers(mode: NumaBinding, topology: Topology, local_world_size: int) -> list[int]:
    """The node of each GPU, or of each worker if GPUs do not tell; [Note: a worker's NUMA node]."""
    all_nodes = {cpu.node for cpu in topology.cpus}
    # The kernel says "unknown" for every device of a machine with one node, where it does not matter.
    only_node = min(all_nodes) if len(all_nodes) == 1 else None
    known: list[int] = []
    for device_node in topology.device_nodes:
        node = only_node if device_node is None else device_node
        if node is None:
            break
        known.append(node)
    if len(known) == len(topology.device_nodes) >= local_world_size:
        return known

    # One entry per physical core, grouped by node: worker r takes the node of the core at r/size of
    # the list. With no more workers than cores these cores are distinct, so no node gets more
    # workers than it has cores.
    cores = sorted({(cpu.node, cpu.core) for cpu in topology.usable})
    if not cores:
        raise ConfigError(
            _FLAG,
            mode,
            f"none of the CPUs this process may run on ({format_cpus(topology.allowed) or 'none'})"
            " is online",
        )
    return [cores[rank * len(cores) // local_world_size][0] for rank in range(local_world_size)]


def _exclusive_share(
    on_node: Sequence[Cpu], node: int, turn: int, num_peers: int
) -> frozenset[int]:
    # Whole physical cores: two workers on the two threads of a core would share it after all.
    cores = _group((cpu.core, cpu) for cpu in on_node)
    if num_peers > len(cores):
        raise ConfigError(
            _FLAG,
            "exclusive",
            f"NUMA node {node} has {len(cores)} physical cores for this process,"
            f" fewer than the {num_peers} workers or GPUs that share them",
            "use --numa-binding=node, or start fewer workers",
        )
    in_order = [cores[core] for core in sorted(cores)]
    each, left_over = divmod(len(in_order), num_peers)
    # The first `left_over` get one more.
    start = turn * each + min(turn, left_over)
    stop = start + each + (turn < left_over)
    return _indices(cpu for core in in_order[start:stop] for cpu in core)


def _core_complex(on_node: Sequence[Cpu], node: int, turn: int) -> frozenset[int]:
    without = [cpu.index for cpu in on_node if cpu.cache is None]
    if without:
        raise ConfigError(
            _FLAG,
            "core-complex",
            f"this machine does not report which CPUs of NUMA node {node} share a cache"
            f" (no cache/index*/shared_cpu_list for CPU {format_cpus(without)})",
            "use --numa-binding=node",
        )
    complexes = _group((cpu.cache, cpu) for cpu in on_node)
    # A cpuset may leave some complexes with fewer cores than others: the fullest first.
    in_order = sorted(
        complexes.values(),
        key=lambda cpus: (-len({cpu.core for cpu in cpus}), -len(cpus), cpus[0].index),
    )
    return _indices(in_order[turn % len(in_order)])


def _group(pairs: Iterable[tuple[_Key, Cpu]]) -> dict[_Key, list[Cpu]]:
    groups: defaultdict[_Key, list[Cpu]] = defaultdict(list)
    for key, cpu in pairs:
        groups[key].append(cpu)
    return groups


def _indices(cpus: Iterable[Cpu]) -> frozenset[int]:
    return frozenset(cpu.index for cpu in cpus)


def visible_devices(setting: str | None, devices: Sequence[str | None]) -> tuple[int | None, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` makes of a machine's GPUs.

    Args:
        setting: the variable's value; None if it is not set.
        devices: the UUID of each GPU of the machine in PCI order, None where unknown.

    Returns:
        For each device workers see, its index into ``devices``, or None for one that is named in a
        way that cannot be resolved without the driver (a MIG slice, a UUID not in ``devices``). As
        in CUDA, the list ends before the first number that is not a device.
    """
    if setting is None:
        return tuple(range(len(devices)))
    seen: list[int | None] = []
    for item in (part.strip() for part in setting.split(",")):
        if re.fullmatch(r"[0-9]+", item):
            if int(item) >= len(devices):
                break
            seen.append(int(item))
        elif item and not item.startswith("-"):
            # CUDA also takes the start of a UUID, if only one device has it.
            matches = [
                index for index, uuid in enumerate(devices) if uuid and uuid.startswith(item)
            ]
            seen.append(matches[0] if len(matches) == 1 else None)
        else:
            break  # '' hides all devices, '-1' those after it
    return tuple(seen)


def parse_cpus(text: str) -> frozenset[int]:
    """The kernel's notation: ``0-3,8`` is 0, 1, 2, 3, 8; empty text is no CPU.

    Raises:
        ValueError: not in that notation.
    """
    cpus: set[int] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        low, dash, high = item.partition("-")
        cpus.update(range(int(low), int(high if dash else low) + 1))
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """The inverse of :func:`parse_cpus`, shortest form."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(str(end) for end in run) for run in runs)
