"""What a launch is: frozen data, validated once, passed down whole.

Nothing here touches the machine. ``settings.py`` fills a :class:`LaunchConfig` from flags, ``PET_*`` variables
and the cluster's environment; ``functions.py`` fills one from a :class:`~rallypoint.launch.functions.MultiprocessConfig`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import IntFlag, StrEnum
from typing import Any, Self

from rallypoint.errors import ConfigError
from rallypoint.rendezvous.backend import Endpoint
from rallypoint.rendezvous.defaults import JOIN_TIMEOUT, LAST_CALL_TIMEOUT, LEASE, MASTER_PORT
from rallypoint.rendezvous.parameters import RendezvousParameters

from .placement.numa import NumaBinding


DEFAULT_RUN_ID = "none"  # torchrun's
# In seconds. The first is torchrun's; the second is how long a failing worker may save and clean up after its peers notice.
DEFAULT_SHUTDOWN_TIMEOUT, DEFAULT_CAUSE_TIMEOUT = 30.0, 5.0


class StartMethod(StrEnum):
    """How a worker is started."""

    FORKSERVER = "forkserver"  # a fork of a process that has imported torch
    EXEC = "exec"  # a plain interpreter, started from nothing
    FORK = "fork"  # function launches only: a fork of the calling process


class OnHang(StrEnum):
    """What happens to a job that hangs, besides being reported."""

    TELL = "tell"
    RESTART = "restart"  # a failure like any other: all workers restart while restarts are left
    FAIL = "fail"


class Streams(IntFlag):
    """Which standard streams a flag is about; the numbers are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamChoice:
    """``--redirects`` / ``--tee``: one choice for all local ranks, or one for some of them."""

    everyone: Streams = Streams.NONE
    by_local_rank: Mapping[int, Streams] = field(default_factory=dict)

    def of(self, local_rank: int) -> Streams:
        return self.by_local_rank.get(local_rank, self.everyone)

    def any(self) -> bool:
        return bool(self.everyone) or any(self.by_local_rank.values())

    @classmethod
    def parse(cls, text: str, flag: str) -> StreamChoice:
        """``"3"`` or ``"0:1,11:3"`` (local rank : streams)."""
        try:
            if ":" not in text:
                return cls(everyone=Streams(_zero_to_three(text)))
            pairs = [item.strip().split(":") for item in text.split(",")]
            found = [(_rank(rank), Streams(_zero_to_three(s))) for rank, s in pairs]
        except ValueError:
            raise ConfigError(
                flag,
                text,
                "expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a list LOCAL_RANK:STREAMS"
                " such as 0:3,11:1",
            ) from None
        ranks = [rank for rank, _ in found]
        twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
        if twice is not None:
            raise ConfigError(
                flag, text, f"local rank {twice} is named twice", "name it once, such as 0:3,11:1"
            )
        return cls(by_local_rank=dict(found))


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit()):  # int() would also take "-1" and "1_0"
        raise ValueError(text)
    return int(text)


def _zero_to_three(text: str) -> int:
    if text not in {"0", "1", "2", "3"}:
        raise ValueError(text)
    return int(text)


class TargetKind(StrEnum):
    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"
    FUNCTION = "function"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker of a launch runs; travels to the fork server as JSON.

    Args:
        kind: a Python file, a module (``-m``), any program (``--no-python``) or a pickled function.
        name: path, module name or program, as the user gave it.
        args: what follows it on the command line.
        path: function launches: the caller's ``sys.path``, which workers adopt; None otherwise.
        python: interpreter of the workers, None for this one.
        unbuffered: workers' stdout is unbuffered, as under ``python -u``.
        block_buffered: workers' stdout is buffered in blocks if it is a file or pipe; otherwise line by line.
    """

    kind: TargetKind
    name: str
    args: tuple[str, ...] = ()
    path: tuple[str, ...] | None = None
    python: str | None = None
    unbuffered: bool = False
    block_buffered: bool = False

    @property
    def title(self) -> str:
        return " ".join(["-m " * (self.kind is TargetKind.MODULE) + self.name, *self.args])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        path = None if data["path"] is None else tuple(data["path"])
        tuples = {"args": tuple(data["args"]), "path": path}
        return cls(**{**data, **tuples, "kind": TargetKind(data["kind"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Where output goes.

    Args:
        folder: base folder, or None for a private temporary one.
        redirects: streams that go to a file instead of the console.
        tee: streams that go to a file and to the console, each line with a prefix.
        console_ranks: local ranks shown on the console; None shows all.
        stdout_filters: lines of teed stdout that contain one of these are also collected in ``filtered_stdout.log``.
        stderr_filters: the same for stderr.
        as_json: each line is written as a record in JSON, to files and to the console.
        max_size: the limit for a log file, in bytes; 0: no limit.
        prefix_template: the prefix of teed lines; may contain ``${role_name}``, ``${local_rank}``, ``${rank}``.
    """

    folder: str | None = None
    redirects: StreamChoice = field(default_factory=StreamChoice)
    tee: StreamChoice = field(default_factory=StreamChoice)
    console_ranks: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None
    as_json: bool = False
    max_size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsPlace:
    """Where a job's metrics are published: on a port or in a file.

    Args:
        shown: as the user gave it.
        host: the address to listen on; empty: all.
        port: 0: any free one.
        path: the file; None: they are on the port.
    """

    shown: str
    host: str = ""
    port: int = 0
    path: str | None = None

    @classmethod
    def parse(cls, text: str, flag: str) -> MetricsPlace:
        """``:9400`` (loopback), ``HOST:9400``, ``*:9400`` or a path.

        Raises:
            ConfigError: ``text`` is none of these.
        """
        host, colon, port = text.rpartition(":")
        if "/" in text or not colon:
            if text.isdigit():
                raise ConfigError(flag, text, f"expected a path, or :{text} for that port")
            return cls(shown=text, path=text)
        if not (port.isascii() and port.isdigit() and int(port) < 65536):
            raise ConfigError(flag, text, "expected :PORT, HOST:PORT or a path")
        host = host.removeprefix("[").removesuffix("]")
        return cls(shown=text, host={"": "127.0.0.1", "*": ""}.get(host, host), port=int(port))


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousConfig:
    """How the supervisors of several nodes meet. Ignored with one node.

    Args:
        run_id: the job's name. Jobs with different names may share an endpoint.
        node_rank: this node's rank, or None to have one assigned.
        host: the host that all nodes know, and that serves the job's store.
        port: its port.
        endpoint: where the store is, if no node serves it or one of several hosts may; None: at ``host`` and ``port``.
        options: the backend's own, by name.
        join_timeout: seconds to wait for all nodes.
        last_call: seconds a round stays open for more nodes once there are enough.
        lease: seconds of silence after which a node counts as lost.
        is_host: whether this node serves the store; None: if ``host`` is this machine.
        label: rack or switch of this node: nodes with equal labels get adjacent ranks.
        split_brain_guard: a minority that is cut off does not continue on its own.
        plug_in: the parameters of a third party's handler, if one decides the membership; ``host``, ``port`` and
            ``endpoint`` are ignored then. Used even with one node.
    """

    run_id: str
    node_rank: int | None = 0
    host: str = "127.0.0.1"
    port: int = MASTER_PORT
    endpoint: Endpoint | None = None
    options: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # a password may be among them
    join_timeout: float = JOIN_TIMEOUT
    last_call: float = LAST_CALL_TIMEOUT
    lease: float = LEASE
    is_host: bool | None = None
    label: str = ""
    split_brain_guard: bool = True
    plug_in: RendezvousParameters | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """One node's share of a job.

    Args:
        job: what to run.
        workers_per_node: number of workers this supervisor starts; None: one for each accelerator of the machine,
            counted by torch once the fork server has imported it.
        accelerator: the type of accelerator to count in that case ("cuda", "xpu", …), or None for any.
        num_nodes: number of supervisors the job has, at most.
        min_nodes: how many of them it needs to run; None: all of them.
        max_restarts: how many times the job is restarted after a failure.
        restart_window: seconds after which a restart no longer counts against ``max_restarts``; 0: it always does.
        max_losses: at most how many workers in a session are replaced within ``loss_window`` seconds.
        loss_window: see ``max_losses``.
        requeue_on: exit codes of the job after which Slurm is asked to requeue it.
        avoid_hosts: the file that lists hosts to avoid, or None.
        spares: how many extra processes on each node run up to the session and wait there for a rank.
        hang_after: seconds without any activity after which a job is reported as hanging; 0: never.
        hang_after_steps: this many typical steps must pass as well, if the script reports steps, but at most ten minutes.
        on_hang: what happens then besides the report.
        stacks_on_hang: whether the report shows where every worker is.
        slow_after: seconds for which a rank must make the others wait before it is reported as slow; 0: never.
        metrics: where metrics are published, or None.
        traces: the OpenTelemetry exporter that sends the spans; empty: the job is not traced.
        progress: how the script's progress is shown: ``auto``, ``lines`` or ``off``.
        step_timeout: seconds after which a session's worker is ended and replaced if the others wait for it; 0: never.
        master_addr: the host at which workers find their store; None: ``localhost`` (one node) or this host.
        master_port: the port of the workers' store; None or 0: any free one.
        local_addr: the address at which other nodes reach this one.
        role: ROLE_NAME of the workers.
        shutdown_timeout: seconds between SIGTERM (or a forwarded signal) and SIGKILL.
        cause_timeout: seconds between a failure that is only a symptom and SIGTERM for the others.
        signals: signals that are forwarded to the workers and end the job; SIGTERM, SIGINT and SIGHUP always do.
        quit_shows_stacks: SIGQUIT shows where the workers are instead of ending the job, although ``signals`` contains it.
        passed_signals: signals that are forwarded to the workers without ending the job.
        sigterm_repeats: SIGTERM may arrive several times for one reason; a repeat does not shorten the grace period.
        start_method: fork server or plain interpreters.
        preload: modules the fork server imports after torch.
        learned_preload: whether parts of torch that workers import are preloaded for later workers.
        warm: the fork server is a fork of a warm server, which is kept for this many seconds after a job; None: it is not.
        templates: ``{rank}``, ``{local_rank}``, ``{node_rank}`` and ``{generation}`` in the target's arguments are
            replaced by each worker's own.
        virtual_local_rank: every worker sees LOCAL_RANK=0 and one device.
        numa_binding: how workers are bound to CPUs, or None.
        local_rank_base: local rank of the first worker (several supervisors on one machine).
        local_world_size: workers on this machine over all its supervisors; None: workers_per_node.
        group_rank: GROUP_RANK of the workers where it is not the node rank.
        group_world_size: GROUP_WORLD_SIZE likewise.
        rank_offset: rank of the first worker, for a launch that is part of a larger job.
        world_size: number of workers of that larger job.
        bind: address that this node's stores listen on; ``*``: all; None: the one at which the other nodes reach it;
            with one node, the loopback.
        secret: the secret that all nodes and workers of the job share. None: anyone who can reach the job's ports
            counts as a member.
    """

    job: Job
    rendezvous: RendezvousConfig
    logs: LogConfig = field(default_factory=LogConfig)
    workers_per_node: int | None = 1
    accelerator: str | None = None
    num_nodes: int = 1
    min_nodes: int | None = None
    max_restarts: int = 0
    restart_window: float = 0.0
    max_losses: int = 10
    loss_window: float = 600.0
    requeue_on: frozenset[int] = frozenset()
    avoid_hosts: str | None = None
    spares: int = 0
    step_timeout: float = 0.0
    hang_after: float = 0.0
    hang_after_steps: int = 0
    on_hang: OnHang = OnHang.TELL
    stacks_on_hang: bool = True
    slow_after: float = 0.0
    progress: str = "off"
    metrics: MetricsPlace | None = None
    traces: str = ""
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    role: str = "default"
    shutdown_timeout: float = DEFAULT_SHUTDOWN_TIMEOUT
    cause_timeout: float = DEFAULT_CAUSE_TIMEOUT
    signals: tuple[signal.Signals, ...] = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
    )
    quit_shows_stacks: bool = False
    passed_signals: tuple[signal.Signals, ...] = ()
    sigterm_repeats: bool = False
    start_method: StartMethod = StartMethod.FORKSERVER
    preload: tuple[str, ...] = ()
    learned_preload: bool = True
    warm: float | None = None
    templates: bool = False
    virtual_local_rank: bool = False
    numa_binding: NumaBinding | None = None
    local_rank_base: int = 0
    local_world_size: int | None = None
    group_rank: int | None = None
    group_world_size: int | None = None
    rank_offset: int = 0
    world_size: int | None = None
    bind: str | None = None
    secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.workers_per_node is not None and self.workers_per_node < 1:
            raise ConfigError(
                "--nproc-per-node", str(self.workers_per_node), "expected at least 1 worker"
            )
        if self.num_nodes < 1:
            raise ConfigError("--nnodes", str(self.num_nodes), "expected at least 1 node")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.num_nodes:
            nodes = f"{self.min_nodes}:{self.num_nodes}"
            raise ConfigError("--nnodes", nodes, "expected MIN:MAX with 1 <= MIN <= MAX")
        if self.max_restarts < 0:
            raise ConfigError("--max-restarts", str(self.max_restarts), "expected 0 or more")
        if self.spares and (
            self.job.kind in {TargetKind.PROGRAM, TargetKind.FUNCTION}
            or self.start_method is not StartMethod.FORKSERVER
        ):
            raise ConfigError(
                "--spares",
                str(self.spares),
                "expected a Python script or module, and --start-method forkserver",
            )
        if self.shutdown_timeout < 0:
            raise ConfigError(
                "--shutdown-timeout", str(self.shutdown_timeout), "expected 0 or more seconds"
            )
        node_rank = self.rendezvous.node_rank
        if node_rank is not None and not 0 <= node_rank < self.num_nodes:
            raise ConfigError(
                "--node-rank",
                str(node_rank),
                f"expected 0 to {self.num_nodes - 1} (--nnodes is {self.num_nodes})",
            )
        if self.master_port is not None and not 0 <= self.master_port < 65536:
            raise ConfigError("--master-port", str(self.master_port), "expected 0 to 65535")

    @property
    def ending_signals(self) -> frozenset[signal.Signals]:
        """The signals that end the job: ``signals``, and SIGTERM, SIGINT and SIGHUP unless they are passed."""
        always = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} - set(self.passed_signals)
        return frozenset(always.union(self.signals))

    @property
    def elastic(self) -> bool:
        """Whether nodes may come and go, which they may if their ranks are assigned."""
        return self.num_nodes > 1 and self.rendezvous.node_rank is None
