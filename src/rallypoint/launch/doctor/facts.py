"""What a node reports about itself and its connections to others: data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A graphics processor as its driver describes it.

    Args:
        name: its model.
        driver: the driver's version.
        errors: uncorrected memory errors since the last reset; None: not counted.
        slowed: why its clock is held down, other than for lack of work; may be empty.
    """

    name: str
    driver: str = ""
    errors: int | None = None
    slowed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What a node reports about itself. Sizes are in bytes; None: unknown, or without a limit.

    Args:
        host: its name.
        python: version.
        torch: version; empty: not installed.
        rallypoint: version.
        workers: how many it is to start; None: one per device.
        open_files: the most files that a process may open, after raising the soft limit.
        locked_memory: the most memory that a process may lock.
        processes: the most processes and threads that may run.
        processes_limit: the name of that limit.
        too_many_workers: why it cannot run that many workers; may be empty.
        cpu_seconds: the most CPU time that a process may use, in seconds: the lower of its limits.
        file_size: the most bytes that a file may have, also in memory.
        cpus: CPUs that this process may use.
        quota: the control group's limit, in CPUs.
        memory: available memory.
        shm_total: size of ``/dev/shm``.
        shm_free: what is left of it.
        folders: free space of folders that a job writes to.
        folder_problem: why one of them cannot be used; may be empty.
        loopback_problem: why it cannot reach itself, where workers of one node meet; may be empty.
        name_address: the address of this machine that its name resolves to; empty: none.
        gloo: the interface that Gloo takes, and its address.
        nccl: the interfaces that NCCL takes for TCP.
        infiniband: whether there are InfiniBand devices.
        gpus: graphics processors.
        gpu_problem: why they could not be asked; may be empty.
    """

    host: str
    python: str = ""
    torch: str = ""
    rallypoint: str = ""
    workers: int | None = 1
    open_files: int | None = None
    locked_memory: int | None = None
    processes: int | None = None
    processes_limit: str = ""
    too_many_workers: str = ""
    cpu_seconds: int | None = None
    file_size: int | None = None
    cpus: int = 1
    quota: float | None = None
    memory: int | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    folders: Mapping[str, int] | None = None
    folder_problem: str = ""
    loopback_problem: str = ""
    name_address: str = ""
    gloo: tuple[str, str] = ("", "")
    nccl: tuple[str, ...] = ()
    infiniband: bool = False
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what a node of the same version has written."""
        gpus = tuple(Gpu(**each) for each in data["gpus"])
        interface, address = data["gloo"]
        fields = {"gpus": gpus, "gloo": (interface, address), "nccl": tuple(data["nccl"])}
        return cls(**{**data, **fields})


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A connection from one node to another, over the address that Gloo uses.

    Args:
        source: the node that connects.
        target: the other one.
        problem: why there is none; may be empty.
        latency: seconds from one to the other.
        bandwidth: bytes per second.
        clock: by how many seconds the target's clock is ahead.
    """

    source: int
    target: int
    problem: str = ""
    latency: float | None = None
    bandwidth: float | None = None
    clock: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """All-reduces over all nodes with Gloo.

    Args:
        problem: why there was none; may be empty.
        latency: seconds for a small one.
        bandwidth: bytes of a large one per second.
    """

    problem: str = ""
    latency: float | None = None
    bandwidth: float | None = None
