"""Run a function on several workers and return its results: no script, no command line.

Its parts: the config (``multiprocess_config``), the pickled call and results (``payload``), the process group of the
workers (``process_group``, ``backends``) and, as for ``rally run``, the supervisor.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rallypoint._core import env as environment, limits, secret
from rallypoint.errors import ConfigError, LaunchError, RallyError, WorkersFailed

from . import host_functions, multiprocess_config
from .config import Job, LaunchConfig, LogConfig, RendezvousConfig, StartMethod, TargetKind
from .coordination.interface import LoneNode, NodeFacts
from .host_functions import Cluster, HostLaunch
from .multiprocess_config import LAUNCH_METHODS, MultiprocessConfig
from .output.console import Console
from .output.report import FailureReport
from .policy import Aim
from .supervision.job_end import Outcome
from .supervisor import Supervisor
from .worker import payload, process_group
from .worker.backends import default_backend, get_distributed_backend, set_distributed_backend
from .worker.job import WorkerFds
from .worker.process_group import (
    init_and_run,
    init_dist,
    init_process_group_from_backend,
    parallel_mesh,
)


__all__ = [
    "MultiprocessConfig",
    "default_backend",
    "get_distributed_backend",
    "init_and_run",
    "init_dist",
    "init_process_group_from_backend",
    "launch_subprocesses",
    "parallel_mesh",
    "set_distributed_backend",
]

_log = logging.getLogger(__name__)

T = TypeVar("T")

# What the supervisor's errors call a setting, and what it is called here.
_FIELDS = {"--master-port": "master_port", "--master-addr": "master_addr"}


def launch_subprocesses(
    func: Callable[..., T],
    cfg: MultiprocessConfig,
    *args: Any,
    setup: Callable[[], object] | None = None,
    rank_offset: int = 0,
    hosts: Sequence[str] | Cluster = (),
    ssh_options: str = "",
    **kwargs: Any,
) -> list[T]:
    """Call ``func(*args, **kwargs)`` on ``cfg.world_size`` workers, here or on ``hosts``, and return their results by rank.

    In each worker, in this order: the variables of its rank are set (as under ``rally run``), ``setup`` is called,
    logging is set up with rank and world size (if ``setup`` has not done so), its CUDA device is made
    current, the default process group is formed and proven, with the mesh of ``cfg`` (:func:`parallel_mesh`);
    then ``func`` is called, and the group is destroyed. Workers have the caller's ``sys.path``,
    ``sys.argv``, environment and folder. They do not run the caller's script again, so it needs no
    ``__main__`` guard. Their output appears on the caller's ``sys.stdout`` and ``sys.stderr``.

    Functions may be lambdas, closures, partials, bound methods or defined in ``__main__``: whatever cannot be imported
    is pickled by value (cloudpickle). The same goes for results; return CPU tensors, not CUDA ones. A worker that calls
    ``sys.exit()`` without an error returns None.

    With ``cfg.world_size`` 1 no worker is started: ``func`` is called in this process, inside a process group of one,
    with the same variables, which are restored afterwards. Its exceptions are not wrapped. A default process group that
    already exists is used and kept.

    A job in several parts (several machines): each part is a launch with the same ``world_size``, ``master_addr`` and
    ``master_port``, its own ``rank_offset``, and its number of workers as ``local_world_size``. The part with
    ``rank_offset=0`` serves the store until its own workers have exited.

    With ``hosts`` the workers are on these machines, started over ssh as by ``rally run --hosts`` (docs/several-hosts.md),
    and the call and its results travel through ssh. Functions and classes that are not from an installed package are
    pickled by value. If this process exits or the connection to it breaks, the hosts stop their workers.

    With ``hosts=rallypoint.ray`` (the module), or ``hosts=rallypoint.ray.Bundles(…)``, the workers are on a Ray cluster, with
    ``cfg.local_world_size`` of them on each node (docs/clusters/ray.md).

    Blocks: until all workers and their processes have exited.
    Threads: may be called from any thread; signals are noticed only in the main thread, where Python delivers them.
    Signals: Ctrl-C is forwarded to the workers (a second one kills them), then KeyboardInterrupt is raised here.
    SIGTERM, SIGHUP and SIGQUIT stop the workers too, and then have their previous effect.
    Args:
        func: the function; it must be picklable unless ``launch_method`` is ``fork``.
        cfg: sizes, addresses and backends; unset fields are resolved from this machine.
        *args: arguments for ``func``; every worker gets a copy.
        setup: called without arguments in each worker before the process group is formed, so it
            may configure logging, register a backend, or set variables that a backend reads.
        rank_offset: rank of the first worker.
        hosts: ``["a", "b:8"]``: the machines, ``b`` with 8 workers. The others have ``cfg.local_world_size`` workers,
            or an equal share of ``cfg.world_size``. Or ``rallypoint.ray``.
        ssh_options: options for ssh, as in a shell: ``"-p 2222 -i key"``.
        **kwargs: keyword arguments for ``func``.
    Returns:
        The results of the workers started here (with ``hosts``: of all workers), by rank.
    Raises:
        ConfigError: a setting cannot work, or the call cannot be pickled; nothing has been started.
        WorkersFailed: a worker failed, or its result cannot be pickled; the text is the report.
        LaunchError: the job's processes could not be run, or a result cannot be unpickled here.
    """
    multiprocess_config.check(cfg)
    _check_calls(func, setup)
    if setup is None:
        _check_arguments(func, args, kwargs)
    if hosts:
        if rank_offset:
            raise ConfigError("rank_offset", rank_offset, "cannot be combined with hosts")
        call = payload.Call(func, args, kwargs, setup)
        if isinstance(hosts, Cluster):
            if ssh_options:
                raise ConfigError("ssh_options", ssh_options, "has no effect on such hosts")
            return hosts.call_on_hosts(call, cfg)
        launch = host_functions.host_launch(hosts, cfg, ssh_options)
        _flush_streams()
        return _on_hosts(launch, call)
    if ssh_options:
        raise ConfigError("ssh_options", ssh_options, "has no effect without hosts")
    asked, cfg = cfg, cfg.with_sizes()
    assert cfg.world_size is not None
    call = payload.Call(func, args, kwargs, setup)
    if cfg.world_size <= 1:
        return [_run_inline(call, cfg, by_default=asked.world_size is None)]
    joins = _check_part(cfg, rank_offset)
    _check_fork(cfg)
    # The caller's buffered output must not appear after that of its workers, or be printed a second time by a fork.
    _flush_streams()
    outcome = _supervise(call, cfg, rank_offset, joins)
    return _results(outcome, cfg, rank_offset)


def _check_calls(func: object, setup: object) -> None:
    if not callable(func):
        raise ConfigError("func", func, "expected a callable")
    if (problem := limits.working_directory()) is not None:
        raise LaunchError(
            f"the working directory of this process: {problem}; os.chdir to another one"
        )
    if setup is not None and not callable(setup):
        raise ConfigError("setup", setup, "expected a function without arguments, or None")


def _check_arguments(
    func: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Other launchers take ``setup`` and ``rank_offset`` as third and fourth arguments, before ``*args``."""
    if not args or not (callable(args[0]) or args[0] is None):
        return
    offset_too = len(args) > 1 and isinstance(args[1], int)
    rest = [args[1:], args[2:]] if offset_too else [args[1:]]
    if not _fits(func, args, kwargs) and any(_fits(func, each, kwargs) for each in rest):
        raise ConfigError(
            "setup",
            payload.name_of(args[0]) if args[0] is not None else None,
            f"arguments after cfg go to {payload.name_of(func)}, which does not accept these",
            "write setup=…, rank_offset=…",
        )


def _fits(func: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        # A decorator's wrapper may take other arguments than the function it wraps.
        inspect.signature(func, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        pass  # builtins may not say what they take
    return True


def _check_part(cfg: MultiprocessConfig, rank_offset: int) -> bool:
    """Whether another launch serves the store for this one."""
    assert cfg.world_size is not None
    assert cfg.local_world_size is not None
    if cfg.rank:
        raise ConfigError(
            "rank", cfg.rank, "a launch assigns the ranks of its workers", "use rank_offset"
        )
    most = cfg.world_size - cfg.local_world_size
    if not 0 <= rank_offset <= most:
        raise ConfigError(
            "rank_offset",
            rank_offset,
            f"expected 0 to {most}: {cfg.local_world_size} workers start here (local_world_size)"
            f" and world_size is {cfg.world_size}",
        )
    in_parts = cfg.local_world_size < cfg.world_size
    by_file = cfg.init_method.startswith("file://")
    if in_parts and not by_file and cfg.master_port is None:
        raise ConfigError(
            "master_port",
            cfg.master_port,
            f"{cfg.local_world_size} of the job's {cfg.world_size} workers start here, so all launches of the job"
            " need the same port",
        )
    if by_file and not in_parts:
        path = cfg.init_method.removeprefix("file://")
        if os.path.exists(path) and os.path.getsize(path) > 0:
            raise ConfigError(
                "init_method",
                cfg.init_method,
                "this store file is not empty: another job has used it",
                "remove it, or name another one",
            )
    return rank_offset > 0 and not by_file


def _check_fork(cfg: MultiprocessConfig) -> None:
    if LAUNCH_METHODS[cfg.launch_method] is not StartMethod.FORK or "torch" not in sys.modules:
        return
    import torch
    import torch.distributed as dist

    hint = "use launch_method='forkserver'"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "launch_method",
            "fork",
            "CUDA is initialized in this process, so its forks cannot use it",
            hint,
        )
    if dist.is_initialized():
        raise ConfigError(
            "launch_method",
            "fork",
            "this process has a process group, which its forks would inherit",
            hint,
        )


def _flush_streams() -> None:
    import ctypes

    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            pass  # closed, or nobody reads it
    ctypes.CDLL(None).fflush(None)


# -- on other hosts -------------------------------------------------------------------------------


def _on_hosts(launch: HostLaunch, call: payload.Call) -> list[Any]:
    ended = host_functions.run(launch, call, environment.snapshot())
    if ended.signal is not None and ended.verdict.exit_code:
        _have_its_effect(ended.signal)
    return host_functions.results(ended, launch)


# -- in this process ------------------------------------------------------------------------------


def _run_inline(call: payload.Call, cfg: MultiprocessConfig, *, by_default: bool) -> Any:
    import torch.distributed as dist

    name = payload.name_of(call.func)
    if by_default:
        # A caller who wants workers and gets none should see this even with Python's default logging.
        _log.warning(
            "%s runs in this process: world_size is unset, and this machine has no CUDA device, or only one;"
            " set world_size to start workers",
            name,
        )
    else:
        _log.info("%s runs in this process: world_size is 1", name)
    cfg = replace(cfg, rank=0, local_rank=0, local_world_size=1, master_addr=None, master_port=None)
    ours = not dist.is_initialized()
    # If this process is already in a larger group, it keeps its rank there.
    place = process_group.variables(cfg) if ours or dist.get_world_size() == 1 else {}
    with environment.overlay(place):
        if call.setup is not None:
            call.setup()
        if ours:
            process_group.init_alone(cfg.backend)
        try:
            return call.func(*call.args, **call.kwargs)
        finally:
            if ours:
                process_group.leave_dist()


# -- in workers -----------------------------------------------------------------------------------


class _StoreElsewhere(LoneNode):
    """One part of a job in several launches: another launch serves the workers' store."""

    serves_store = False

    def __init__(self, addr: str, port: int) -> None:
        super().__init__()
        self._addr = addr
        self._port = port

    def join(self, generation: int, facts: NodeFacts) -> None:
        super().join(generation, replace(facts, store_addr=self._addr, store_port=self._port))


def _supervise(
    call: payload.Call, cfg: MultiprocessConfig, rank_offset: int, joins: bool
) -> Outcome:
    method = LAUNCH_METHODS[cfg.launch_method]
    facts = payload.CallerFacts(
        cfg=_for_workers(cfg),
        argv=tuple(sys.argv),
        log_level=logging.getLogger().level,
        joins=joins,
    )

    def call_in_fork(fds: WorkerFds) -> None:
        payload.run_in_fork(fds, call, facts)

    fork = method is StartMethod.FORK
    payload_fd = None
    try:
        payload_fd = None if fork else payload.pack(call, facts)
        token = uuid.uuid4().hex
        supervisor = Supervisor(
            _launch_config(call, cfg, rank_offset, method, token),
            coordination=_coordination(cfg, joins),
            console=_console(),
            say=lambda text: _log.warning("%s", text),
            token=token,
            payload_fd=payload_fd,
            call=call_in_fork if fork else None,
        )
        return supervisor.run()
    except ConfigError as error:
        if error.field not in _FIELDS:
            raise
        name = _FIELDS[error.field]
        raise ConfigError(name, error.value, error.problem, error.hint) from None
    except OSError as error:
        reached = limits.explain(error)
        if reached is None or isinstance(error, RallyError):
            raise
        raise LaunchError(reached) from None
    finally:
        if payload_fd is not None:
            os.close(payload_fd)


def _coordination(cfg: MultiprocessConfig, joins: bool) -> LoneNode:
    if not joins:
        return LoneNode()
    assert cfg.master_addr is not None
    assert cfg.master_port is not None
    return _StoreElsewhere(cfg.master_addr, cfg.master_port)


def _for_workers(cfg: MultiprocessConfig) -> MultiprocessConfig:
    """The config without what each worker has in its environment."""
    by_file = cfg.init_method.startswith("file://")
    return replace(
        cfg,
        rank=None,
        local_rank=None,
        master_addr=None,
        master_port=None,
        init_method=cfg.init_method if by_file else "env://",
    )


def _launch_config(
    call: payload.Call,
    cfg: MultiprocessConfig,
    rank_offset: int,
    method: StartMethod,
    token: str,
) -> LaunchConfig:
    assert cfg.world_size is not None
    assert cfg.local_world_size is not None
    name = payload.name_of(call.func)
    return LaunchConfig(
        job=Job(
            kind=TargetKind.FUNCTION,
            name=name,
            path=tuple(str(entry) for entry in sys.path),
        ),
        rendezvous=RendezvousConfig(run_id=f"{name}-{token[:8]}"),
        logs=LogConfig(),
        workers_per_node=cfg.local_world_size,
        world_size=cfg.world_size,
        rank_offset=rank_offset,
        group_rank=rank_offset // cfg.local_world_size,
        group_world_size=-(-cfg.world_size // cfg.local_world_size),
        master_addr=cfg.master_addr,
        master_port=cfg.master_port,
        secret=_secret(alone=cfg.local_world_size == cfg.world_size),
        start_method=method,
        preload=host_functions.PRELOAD,
    )


def _secret(*, alone: bool) -> bytes | None:
    """The job's secret: from the environment, from the user's file if other launches take part, or made for this launch."""
    env = environment.snapshot()
    if alone:
        return secret.from_environment(env) or secret.make()
    found = secret.shared(env)
    if found is None:
        _log.warning(
            "no secret: anyone who can reach this job's ports can run code as you if workers use rpc; make one with"
            " `rally secret` and set RALLY_SECRET_FILE on all machines"
        )
    return found


def _console() -> Console:
    if sys.stdout is None or sys.stderr is None:  # a program without a console
        return Console()
    return Console.of_streams(sys.stdout, sys.stderr)


def _results(outcome: Outcome, cfg: MultiprocessConfig, rank_offset: int) -> list[Any]:
    if outcome.aim is Aim.SIGNALLED:
        _have_its_effect(outcome.signal or signal.SIGTERM)
    if outcome.report is not None:
        raise WorkersFailed(outcome.report)
    assert cfg.world_size is not None
    silent = [rank_offset + index for index, data in enumerate(outcome.results) if not data]
    if silent:
        reason = f"rank {silent[0]} exited with code 0 before its function returned; does it call os._exit?"
        raise WorkersFailed(FailureReport(failures=(), world_size=cfg.world_size, reason=reason))
    return [
        payload.unpack_result(rank_offset + index, data)
        for index, data in enumerate(outcome.results)
    ]


def _have_its_effect(number: int) -> None:
    """The workers are gone. The signal that stopped them now has the effect here that it would have had without them."""
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise LaunchError(f"stopped by {signal.Signals(number).name}; all workers have ended")
