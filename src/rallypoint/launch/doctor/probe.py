"""What this machine reports about itself, looked up here and now."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import rallypoint
from rallypoint._core import addresses, env as environment, limits
from rallypoint._core.interfaces import Interface, interfaces

from . import cgroup
from .facts import Gpu, NodeFacts


# nvidia-smi takes a second; with a broken driver it may never exit.
GPU_PATIENCE = 20.0
_GPU_FIELDS = (
    "name",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown",
)
# linux/capability.h
_CAP_IPC_LOCK = 14
_SLOWED = {3: "hardware slowdown", 4: "heat"}
# Interfaces that NCCL leaves out unless there is no other.
_NOT_FOR_NCCL = ("lo", "docker")


def facts(workers: int | None, log_folder: str | None = None) -> NodeFacts:
    """This machine's facts; its network is what the variables of this process choose.

    Args:
        workers: how many it is to start.
        log_folder: where logs go, if it is given.
    """
    env = environment.snapshot()
    found = interfaces()
    name = addresses.hostname()
    most, limit = limits.most_processes()
    shm = _space("/dev/shm")  # noqa: S108  asked for its size
    gpus, gpu_problem = _gpus()
    folders, folder_problem = _folders(log_folder)
    return NodeFacts(
        host=name,
        python=".".join(map(str, _python())),
        torch=_torch(),
        rallypoint=rallypoint.__version__,
        workers=workers,
        open_files=_hard(resource.RLIMIT_NOFILE),
        locked_memory=None if _may_lock_all() else _hard(resource.RLIMIT_MEMLOCK),
        processes=most,
        processes_limit=limit,
        too_many_workers=limits.why_not(workers or 1) or "",
        cpu_seconds=min(filter(None, limits.cpu_seconds(os.getpid())), default=None),
        file_size=limits.file_size(),
        cpus=len(os.sched_getaffinity(0)),
        quota=cgroup.cpu_quota(),
        memory=_memory(),
        shm_total=None if shm is None else shm[0],
        shm_free=None if shm is None else shm[1],
        folders=folders,
        folder_problem=folder_problem,
        loopback_problem=addresses.loopback_problem(addresses.own_host()),
        name_address=addresses.own_address(name) or "",
        gloo=_gloo(env, found, addresses.own_address(name)),
        nccl=_nccl(env, found),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        gpus=gpus,
        gpu_problem=gpu_problem,
    )


def _python() -> tuple[int, int, int]:
    import sys

    return sys.version_info[:3]


def _torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _hard(which: int) -> int | None:
    _, hard = resource.getrlimit(which)
    return None if hard == resource.RLIM_INFINITY else hard


def _may_lock_all() -> bool:
    """Whether the limit on locked memory does not apply to this process: it has CAP_IPC_LOCK."""
    try:
        lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    words = next((line.split() for line in lines if line.startswith("CapEff:")), [])
    return len(words) == 2 and bool(int(words[1], 16) >> _CAP_IPC_LOCK & 1)


def _space(folder: str) -> tuple[int, int] | None:
    """Size and free bytes."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _folders(log_folder: str | None) -> tuple[dict[str, int], str]:
    """Free bytes where a job writes, and what is wrong with one of these folders; may be empty."""
    free: dict[str, int] = {}
    devices: set[int] = set()
    problem = ""
    for name, find in (
        ("temporary files", tempfile.gettempdir),
        (log_folder or "the current folder", lambda: log_folder or "."),
    ):
        try:
            path = Path(find()).absolute()
            while not path.exists():
                path = path.parent
            device = os.stat(path).st_dev
        except OSError as error:
            problem = problem or f"{name}: {error.strerror or error}"
            continue
        if device not in devices and (space := _space(os.fspath(path))) is not None:
            devices.add(device)
            free[os.fspath(path)] = space[1]
    return free, problem


def _memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = {
        name: int(rest.split()[0]) << 10 for name, _, rest in (x.partition(":") for x in lines)
    }
    bounds = [found.get("MemAvailable"), cgroup.available_memory()]
    return min((each for each in bounds if each is not None), default=None)


def _gloo(
    env: Mapping[str, str], found: tuple[Interface, ...], of_name: str | None
) -> tuple[str, str]:
    """The interface and the address that Gloo takes: those of its variable, or of the machine's name."""
    if wanted := env.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return wanted, next((each.address for each in found if each.name == wanted), "")
    address = of_name or "127.0.0.1"
    name = next((each.name for each in found if each.address == address), "")
    return name or ("lo" if addresses.is_loopback(address) else ""), address


def _nccl(env: Mapping[str, str], found: tuple[Interface, ...]) -> tuple[str, ...]:
    names = list(dict.fromkeys(each.name for each in found))
    if wanted := env.get("NCCL_SOCKET_IFNAME", ""):
        exact = wanted.startswith("=")
        words = wanted.lstrip("=").split(",")
        if wanted.startswith("^"):
            unwanted = tuple(wanted[1:].split(","))
            return tuple(name for name in names if not name.startswith(unwanted))
        return tuple(x for x in names if (x in words if exact else x.startswith(tuple(words))))
    if fast := tuple(name for name in names if name.startswith("ib")):
        return fast
    others = tuple(name for name in names if not name.startswith(_NOT_FOR_NCCL))
    return others or tuple(names)


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """NVIDIA's graphics processors, and why they could not be asked."""
    if not Path("/dev/nvidiactl").exists():
        return (), ""
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_GPU_FIELDS)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GPU_PATIENCE, check=False
        )
    except FileNotFoundError:
        return (), ""  # a container that has only the devices
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi has not answered for {GPU_PATIENCE:g} s"
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or ["it says nothing"]
        return (), f"nvidia-smi has failed: {said[-1][:120]}"
    return tuple(_gpu(line) for line in done.stdout.splitlines() if line.strip()), ""


def _gpu(line: str) -> Gpu:
    words = [word.strip() for word in line.split(",")]
    words += [""] * (len(_GPU_FIELDS) - len(words))
    slowed = [why for index, why in _SLOWED.items() if words[index] == "Active"]
    errors = int(words[2]) if words[2].isdigit() else None
    return Gpu(name=words[0], driver=words[1], errors=errors, slowed=", ".join(slowed))
