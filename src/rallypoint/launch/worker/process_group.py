"""The process group of a function launch: form it, prove it, lay out the mesh, leave it.

torch is imported inside the functions: importing :mod:`rallypoint.launch` must not cost its import.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rallypoint._core import addresses, clock, env as environment
from rallypoint.errors import ConfigError, LaunchError, RendezvousConnectionError
from rallypoint.launch import multiprocess_config
from rallypoint.launch.multiprocess_config import MultiprocessConfig
from rallypoint.rendezvous.defaults import JOIN_TIMEOUT

from . import backends


if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it by *
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds to try to connect to another launch's store before logging it, and the pause between tries.
_SILENCE = 3.0
# The variables that init_dist sets.
_SET_BY_INIT = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_PAUSE = 0.2


def init_process_group_from_backend(
    backend: str | None = None,
    *,
    init_method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | None = None,
    timeout: float | None = None,
) -> None:
    """Form the default process group, and prove it with one all-reduce.

    Detects wrong addresses and mixed-up jobs here, not in the first training step.

    Collective: every rank of the job calls it.   Blocks: until all have joined.
    Args:
        backend: default: :func:`get_distributed_backend`. For ``nccl`` set the CUDA device first.
        init_method: as in ``torch.distributed.init_process_group``; not used with ``store``.
        rank: this process's rank; default: from ``init_method`` (the variable ``RANK``).
        world_size: number of ranks; default: from ``init_method`` (``WORLD_SIZE``).
        store: where the ranks meet, instead of ``init_method``.
        timeout: in seconds, for forming the group and for its collectives; default: torch's.
    Raises:
        ConfigError: this process already has a default group.
        LaunchError: the sum over all ranks is not the number of ranks.
        torch.distributed.DistError: other ranks did not join; raised by torch.
    """
    import torch
    import torch.distributed as dist

    name = backend or backends.get_distributed_backend()
    if dist.is_initialized():
        raise ConfigError(
            "backend",
            name,
            f"this process is in a process group of {dist.get_world_size()} already",
            "call torch.distributed.destroy_process_group() first",
        )
    device = backends.device_of(name)
    bound = device == "cuda" and torch.cuda.is_available()
    dist.init_process_group(
        name,
        init_method=None if store is not None else init_method,
        store=store,
        rank=-1 if rank is None else rank,
        world_size=-1 if world_size is None else world_size,
        timeout=None if timeout is None else timedelta(seconds=timeout),
        device_id=torch.device("cuda", torch.cuda.current_device()) if bound else None,
    )
    try:
        _prove(name, device)
    except BaseException:
        dist.destroy_process_group()
        raise


def _prove(backend: str, device: str) -> None:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1, dtype=torch.float32, device=device)
    dist.all_reduce(ones)
    total, size = ones.item(), dist.get_world_size()
    if total != size:
        raise LaunchError(
            f"rank {dist.get_rank()}: an all-reduce of ones over {size} ranks with backend"
            f" {backend!r} came to {total:g}, expected {size}; do several jobs share this"
            " master_addr and master_port?"
        )


@overload
def init_dist(cfg: MultiprocessConfig) -> MultiprocessConfig: ...


@overload
def init_dist(
    rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    local_world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    init_method: str = "env://",
    backend: str | None = None,
) -> MultiprocessConfig: ...


def init_dist(*args: Any, **kwargs: Any) -> MultiprocessConfig:
    """Join the job: variables, CUDA device, proven default group, and the mesh of the config.

    Called with a :class:`MultiprocessConfig`, or with its first fields: ``init_dist(rank, local_rank, world_size, …)``.
    Unset fields are taken from this process's environment (so a script under ``rally run``
    or ``torchrun`` calls ``init_dist()``), then from its devices. :func:`launch_subprocesses` calls it
    before your function.

    :func:`rallypoint.parallel.current_mesh` is the mesh. With ``model_parallelism`` or ``pipeline_parallelism`` over 1,
    :func:`parallel_mesh` returns it as torch's, with the axes ``pp``, ``dp``, ``mp``; neighbours along ``mp`` have
    consecutive ranks.

    Collective: every rank of the job calls it.   Blocks: until all have joined.
    Effects: sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``;
    makes device ``local_rank`` the current CUDA device, where there is CUDA.
    Args:
        args, kwargs: a :class:`MultiprocessConfig`, or its fields.
    Returns:
        The config with everything filled in.
    Raises:
        ConfigError: ranks, sizes and devices do not match; this process already has a group.
        LaunchError: the group is not the expected one (:func:`init_process_group_from_backend`).
        TypeError: neither a config nor its first fields.
    """
    cfg = _config_of(*args, **kwargs).with_environment(environment.snapshot()).resolve()
    assert cfg.world_size is not None
    by_file = cfg.init_method.startswith("file://")
    if cfg.master_port is None and cfg.world_size > 1 and not by_file:
        raise ConfigError(
            "master_port",
            cfg.master_port,
            f"{cfg.world_size} ranks need a port that all of them know",
            "set it, or start the ranks with launch_subprocesses",
        )
    environment.process_environment().update(variables(cfg))
    _take_device(cfg)
    if by_file:
        init_process_group_from_backend(
            cfg.backend, init_method=cfg.init_method, rank=cfg.rank, world_size=cfg.world_size
        )
    elif cfg.master_port is None:
        init_alone(cfg.backend)
    else:
        init_process_group_from_backend(cfg.backend)
    _init_parallelism(cfg)
    return cfg


def _config_of(*args: Any, **kwargs: Any) -> MultiprocessConfig:
    """The config that the arguments of :func:`init_dist` describe."""
    first = args[0] if args else kwargs.get("cfg")
    if not isinstance(first, MultiprocessConfig):
        names = (
            *("rank", "local_rank", "world_size", "local_world_size"),
            *("master_addr", "master_port", "init_method", "backend"),
        )
        wrong = [name for name in kwargs if name not in names] + [
            name for name in names[: len(args)] if name in kwargs
        ]
        if wrong or len(args) > len(names):
            raise TypeError(
                f"init_dist takes a MultiprocessConfig, or {', '.join(names)}"
                + (f"; not {', '.join(wrong)}" if wrong else f"; not {len(args)} arguments")
            )
        return MultiprocessConfig(**dict(zip(names, args, strict=False)), **kwargs)
    if len(args) + len(kwargs) > 1:
        raise TypeError("init_dist takes a MultiprocessConfig alone, or separate arguments")
    return first


def init_alone(backend: str | None) -> None:
    """Form a default group of this process alone, which needs no port."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch re-exports it by *

    init_process_group_from_backend(backend, store=HashStore(), rank=0, world_size=1)


def variables(cfg: MultiprocessConfig) -> dict[str, str]:
    """The environment variables of the worker with the resolved config ``cfg``."""
    found = {
        "RANK": cfg.rank,
        "WORLD_SIZE": cfg.world_size,
        "LOCAL_RANK": cfg.local_rank,
        "LOCAL_WORLD_SIZE": cfg.local_world_size,
        "MASTER_ADDR": cfg.master_addr,
        "MASTER_PORT": cfg.master_port,
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def _take_device(cfg: MultiprocessConfig) -> None:
    """Select the worker's CUDA device. Without NCCL, workers of a machine may share one."""
    count = backends.num_cuda_devices()
    assert cfg.local_rank is not None
    if cfg.local_rank >= count and "nccl" in _backends_of(cfg):
        raise ConfigError(
            "local_rank",
            cfg.local_rank,
            f"backend 'nccl' needs a CUDA device for each worker of a machine, found {count}",
            "start fewer workers, or set backend='gloo'",
        )
    if count:
        import torch

        torch.cuda.set_device(cfg.local_rank % count)


def _backends_of(cfg: MultiprocessConfig) -> str:
    every = (
        cfg.backend,
        cfg.model_parallel_backend,
        cfg.pipeline_parallel_backend,
        cfg.data_parallel_backend,
    )
    return " ".join(name for name in every if name).lower()


def _init_parallelism(cfg: MultiprocessConfig) -> None:
    from rallypoint.parallel import init_parallelism

    chosen = (
        cfg.model_parallel_backend,
        cfg.pipeline_parallel_backend,
        cfg.data_parallel_backend,
    )
    # None means the default group's backend: the axis may then reuse existing groups.
    mp, pp, dp = (None if name == cfg.backend else name for name in chosen)
    init_parallelism(cfg.model_parallelism, cfg.pipeline_parallelism, mp, pp, dp)


def parallel_mesh() -> DeviceMesh | None:
    """The mesh that :func:`init_dist` made, as torch's ``DeviceMesh`` with the axes ``("pp", "dp", "mp")``.

    ``parallel_mesh()["mp"].get_group()`` is the group of an axis. :func:`rallypoint.parallel.current_mesh` is
    the same mesh as Rallypoint's own class, where ``mp`` is called ``tp``.

    Returns:
        The mesh; None outside a job and without model or pipeline parallelism (all ranks are data
        parallel: use the default group).
    """
    if "rallypoint.parallel" not in sys.modules:
        return None
    from rallypoint.parallel import current_mesh

    mesh = current_mesh()
    if mesh is None or mesh.degree("pp") == mesh.degree("tp") == 1:
        return None
    return mesh.device_mesh("pp", "dp", "tp", names=("pp", "dp", "mp"))


def leave_dist() -> None:
    """Destroy the mesh and the default group, if they exist."""
    import torch.distributed as dist

    if "rallypoint.parallel" in sys.modules:
        from rallypoint.parallel import destroy_parallelism

        destroy_parallelism()
    if dist.is_initialized():
        dist.destroy_process_group()


def init_and_run(
    func: Callable[..., T],
    cfg: MultiprocessConfig,
    *args: Any,
    setup: Callable[[], object] | None = None,
    **kwargs: Any,
) -> T:
    """In this process: call ``setup``, join the job (:func:`init_dist`), call ``func``, leave the job.

    Workers of :func:`launch_subprocesses` do the same; use this for processes started in another way.

    Collective: every rank of the job calls it.   Blocks: while ``func`` runs.
    Args:
        func: called as ``func(*args, **kwargs)`` inside the group.
        cfg: as for :func:`init_dist`.
        args, kwargs: for ``func``.
        setup: called first, before the group is formed: it may register a backend, set
            variables that the backend reads, or configure logging.
    Returns:
        What ``func`` returns.
    Raises:
        ConfigError: ``cfg`` is not a :class:`MultiprocessConfig`.
        Exception: what ``setup``, :func:`init_dist` or ``func`` raises; the group is destroyed then too.
    Effects: at the end, restores the variables that :func:`init_dist` sets.
    """
    multiprocess_config.check(cfg)
    if setup is not None:
        setup()
    with environment.kept(_SET_BY_INIT):
        init_dist(cfg)
        try:
            return func(*args, **kwargs)
        finally:
            leave_dist()


def use_one_thread() -> None:
    """In a fork of the caller: use one thread. torch would wait forever for OpenMP threads, which forks lack."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


def wait_for_store(host: str, port: int, timeout: float = JOIN_TIMEOUT) -> None:
    """Block until another launch's store accepts connections.

    torch's own client waits too, but silently and for half an hour.

    Raises:
        RendezvousConnectionError: no connection was accepted within ``timeout`` seconds.
    """
    deadline, silence = clock.Deadline(timeout), clock.Deadline(_SILENCE)
    pause, told = threading.Event(), False
    while True:
        try:
            addresses.connect(host, port, 5).close()
        except OSError as error:
            if deadline.expired():
                raise RendezvousConnectionError(
                    f"no store at {host}:{port} within {timeout:.0f} s ({error.strerror or error});"
                    " is the launch with rank_offset=0 running there, with the same master_port?"
                ) from None
            if silence.expired() and not told:
                told = True
                _log.warning(
                    "waiting for the store at %s:%d, which the launch with rank_offset=0 serves"
                    " (at most %.0f s)",
                    host,
                    port,
                    timeout,
                )
            pause.wait(_PAUSE)
        else:
            return
