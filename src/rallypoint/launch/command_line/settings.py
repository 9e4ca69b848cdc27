"""Makes a :class:`~rallypoint.launch.config.LaunchConfig` from flags and environment.

Precedence: flag, then ``PET_*``, then the cluster, then the default. torchrun's flags that mean nothing here are
accepted, with a remark that says why.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from rallypoint._core import limits, process, secret
from rallypoint.errors import ConfigError
from rallypoint.launch.avoidance import avoid_file, own_host
from rallypoint.launch.config import (
    Job,
    LaunchConfig,
    LogConfig,
    MetricsPlace,
    OnHang,
    StartMethod,
    StreamChoice,
    TargetKind,
)
from rallypoint.launch.placement import clusters, requeue
from rallypoint.launch.placement.clusters import slurm
from rallypoint.launch.placement.numa import NumaBinding
from rallypoint.tracing import exporters

from .flags import BY_NAME
from .given import Given, resolve
from .nodes import is_range, nodes_from
from .target import target_from
from .values import Values, exit_codes, shutdown_timeout


# Words of --nproc-per-node that mean "one per device", and torch's name of the device.
_DEVICES = {"gpu": "cuda", "cuda": "cuda", "xpu": "xpu", "npu": "npu", "hpu": "hpu", "mtia": "mtia"}
# Where the kernel shows accelerators; without any of them there is nothing for torch to count.
_DEVICE_FILES = (
    "nvidiactl",
    "nvidia0",
    "kfd",
    "dri",
    "dxg",
    "accel",
    "davinci0",
    "davinci_manager",
)

# If one of these flags is set, the cluster is not asked: the flag says where this node stands.
_NODE_FLAGS = ("node_rank", "master_addr", "rdzv_endpoint", "standalone")
# Flags that torchrun does not have and whose empty value means nothing, with what was expected.
_NEVER_EMPTY = {
    "metrics": "expected :PORT, HOST:PORT or a path",
    "traces": "expected an exporter of OpenTelemetry, such as otlp or console",
    "secret_file": "expected a file",
    "avoid_hosts": "expected a file",
    "bind": "expected an address of this machine, or *",
}
# torchrun accepts an empty value for these.
_SELDOM_EMPTY = ("master_addr", "rdzv_endpoint", "rdzv_id", "local_addr")
# Nobody means files smaller than this (in bytes): a unit was forgotten.
_LEAST_LOG_SIZE = 1 << 10
# Flags that scripts rarely have.
_SIZE_FLAGS = frozenset(("nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "max_restarts"))


def config_from(
    given: Given, env: Mapping[str, str], function_path: tuple[str, ...] | None = None
) -> tuple[LaunchConfig, list[str]]:
    """The launch that a command line asks for, and remarks for the user.

    Args:
        given: the command line.
        env: variables.
        function_path: workers run a function that the command line names, with this ``sys.path``; None: they run a script.

    Raises:
        ConfigError: a setting cannot work; named as the user spelled it.
    """
    flags, origins = resolve(given, env)
    values = Values(flags, origins, env)
    _check_empty(values)
    if function_path is None:
        job = target_from(values, given.target)
        _remark_on_flags_after_target(values, job)
    else:
        job = Job(kind=TargetKind.FUNCTION, name=given.target[0], path=function_path)
    start_method, python = _start(values, job.kind)
    placement = None
    if _cluster_decides(values):
        placement = clusters.detect(env, process.ancestors)
    if placement is not None:
        placement = _beside_avoided_hosts(values, placement)
        values.remarks.append(placement.describe())
    workers, accelerator = _workers(values, placement)
    if placement is not None:
        _remark_on_one_cpu(values, placement, workers or 1)
    nodes = nodes_from(values, placement)
    if placement is not None and nodes.min_nodes is not None:
        _remark_on_lost_nodes(values, placement)
    several_here = placement is not None and placement.one_worker_per_task
    signals, passed = _signals(values)
    config = LaunchConfig(
        job=replace(
            job,
            python=python,
            unbuffered=values.switch("unbuffered"),
            block_buffered=_block_buffered(values),
        ),
        rendezvous=nodes.rendezvous,
        logs=_logs(values),
        workers_per_node=workers,
        accelerator=accelerator,
        num_nodes=nodes.num_nodes,
        min_nodes=nodes.min_nodes,
        max_restarts=values.integer("max_restarts", least=0),
        restart_window=values.seconds("restart_window"),
        max_losses=values.integer("max_losses", least=0),
        loss_window=values.seconds("loss_window"),
        requeue_on=_requeue_on(values),
        avoid_hosts=_avoid_hosts(values),
        spares=values.integer("spares", least=0),
        step_timeout=values.seconds("step_timeout"),
        hang_after=values.seconds("hang_after"),
        hang_after_steps=0 if values.is_set("hang_after") else 10,
        on_hang=OnHang(values["on_hang"] or OnHang.TELL),
        stacks_on_hang=_stacks_on_hang(values),
        slow_after=values.seconds("slow_after"),
        progress=values.text("progress"),
        metrics=_metrics(values),
        traces=_traces(values),
        master_addr=nodes.master_addr,
        master_port=nodes.master_port,
        local_addr=values["local_addr"] or None,
        role=values.text("role"),
        shutdown_timeout=shutdown_timeout(values),
        cause_timeout=values.seconds("cause_timeout"),
        signals=signals,
        quit_shows_stacks=signal.SIGQUIT not in passed and not values.is_set("signals_to_handle"),
        passed_signals=passed,
        # At a time limit, and when a preemption's grace time is over, Slurm sends SIGTERM again before SIGKILL.
        sigterm_repeats=bool(env.get("SLURM_JOB_ID")),
        start_method=start_method,
        preload=tuple(name for name in values.text("preload").split(",") if name),
        learned_preload=not values.switch("no_learned_preload"),
        warm=_warm(values, start_method, nodes.num_nodes),
        templates=values.switch("templates"),
        virtual_local_rank=values.switch("virtual_local_rank"),
        numa_binding=cast("NumaBinding | None", values["numa_binding"]),
        local_rank_base=placement.local_rank if placement and several_here else 0,
        local_world_size=placement.tasks_per_machine if placement and several_here else None,
        group_rank=placement.machine_rank if placement and several_here else None,
        group_world_size=placement.num_machines if placement and several_here else None,
        bind=values["bind"],
        secret=_secret(
            values,
            alone=nodes.num_nodes == 1 and nodes.rendezvous.plug_in is None,
            is_first=placement is None or not placement.node_rank,
        ),
    )
    _remark_on_what_has_no_effect(values)
    if not (several_here and config.local_rank_base):  # only one of a machine's tasks says so
        _remark_on_absent_ranks(values, config)
    return config, values.remarks


def _check_empty(values: Values) -> None:
    """Check for `--metrics "$PLACE"` with a variable that is not set."""
    hint = "is a variable of the shell not set?"
    for dest, expected in _NEVER_EMPTY.items():
        if values.is_set(dest) and not values.text(dest).strip():
            raise ConfigError(values.shown(dest), values.text(dest), expected, hint)
    for dest in _SELDOM_EMPTY:
        # An empty PET_… is how a manifest says that nothing is set.
        if values.is_flag(dest) and not values.text(dest).strip():
            values.remarks.append(f"{values.shown(dest)} is empty: {hint}")


def _remark_on_absent_ranks(values: Values, config: LaunchConfig) -> None:
    """Remark on flags for local ranks that this machine does not have."""
    count = config.local_world_size or config.workers_per_node
    if count is None:
        return  # the accelerators are not counted yet
    logs = config.logs
    by_flag = {
        "redirects": logs.redirects.by_local_rank.keys(),
        "tee": logs.tee.by_local_rank.keys(),
        "local_ranks_filter": logs.console_ranks or frozenset(),
    }
    here = "only 0" if count == 1 else f"only 0 to {count - 1}"
    for dest, ranks in by_flag.items():
        absent = sorted(rank for rank in ranks if not 0 <= rank < count)
        if not absent:
            continue
        none_left = dest == "local_ranks_filter" and len(absent) == len(ranks)
        values.remarks.append(
            f"{values.shown(dest)} {values.text(dest)}: there is no local rank"
            f" {', '.join(map(str, absent))} on this machine, {here}"
            f"{'; so the console shows no output of workers' if none_left else ''}"
        )


def _remark_on_flags_after_target(values: Values, job: Job) -> None:
    """Remark on a job's size or place among the script's arguments: the user may have meant it for us."""
    for word in job.args:
        if word == "--":
            return
        dest = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and dest in _SIZE_FLAGS and not values.is_set(dest):
            values.remarks.append(
                f"{word.partition('=')[0]} comes after {job.name}, so the script gets it;"
                " flags of rally run come before the script"
            )
            return


def _cluster_decides(values: Values) -> bool:
    """Whether the cluster says where nodes meet: no flag does, or ``--nnodes`` gives a range and no place."""
    if any(values.is_set(name) for name in _NODE_FLAGS):
        return False
    return not values.is_set("nnodes") or (
        is_range(values.text("nnodes")) and not values.is_set("rdzv_backend")
    )


def _start(values: Values, kind: TargetKind) -> tuple[StartMethod, str | None]:
    word = values["start_method"]
    methods = {"spawn": StartMethod.EXEC, "fork": StartMethod.FORKSERVER}
    if word in methods:
        values.remarks.append(
            f"{values.shown('start_method')} {word}: scripts are started with {methods[word]} here"
        )
    method = methods.get(word or "") or StartMethod(word or StartMethod.FORKSERVER)
    python = values.env.get("PYTHON_EXEC")
    if python and not _same_file(python, sys.executable):
        if shutil.which(python, path=values.env.get("PATH")) is None:
            problem = "not executable" if os.path.exists(python) else "no such interpreter"
            raise ConfigError("PYTHON_EXEC", python, problem)
        return StartMethod.EXEC, python
    if kind is TargetKind.PROGRAM:
        method = StartMethod.EXEC
    if method is StartMethod.EXEC and values.text("preload"):
        values.remarks.append("--preload has no effect without --start-method forkserver")
    return method, None


def _warm(values: Values, start_method: StartMethod, num_nodes: int) -> float | None:
    """For how long a warm server is kept; None: there is none."""
    if not values.switch("warm"):
        return None
    if start_method is not StartMethod.FORKSERVER:
        values.remarks.append("--warm has no effect without --start-method forkserver")
        return None
    if num_nodes > 1:
        values.remarks.append("--warm has no effect with several nodes")
        return None
    return values.seconds("warm_timeout")


def _block_buffered(values: Values) -> bool:
    if values.switch("block_buffered") and values.switch("unbuffered"):
        raise ConfigError("--block-buffered", None, "cannot be combined with --unbuffered")
    return values.switch("block_buffered")


def _stacks_on_hang(values: Values) -> bool:
    if values.switch("stacks_on_hang") and values.switch("no_stacks_on_hang"):
        raise ConfigError("--stacks-on-hang", None, "cannot be combined with --no-stacks-on-hang")
    if values.switch("stacks_on_hang") and not values.seconds("hang_after"):
        values.remarks.append("--stacks-on-hang has no effect with --hang-after 0")
    return not values.switch("no_stacks_on_hang")


def _workers(values: Values, placement: clusters.Placement | None) -> tuple[int | None, str | None]:
    """Number of workers here, or None and the type of accelerator to count."""
    word = values.text("nproc_per_node").strip()
    shown = values.shown("nproc_per_node")
    if placement is not None and placement.one_worker_per_task:
        if values.is_set("nproc_per_node") and word != "1":
            raise ConfigError(
                shown,
                word,
                f"{placement.source} has started {placement.tasks_per_machine} tasks on this"
                " machine already, and each is one worker",
                "leave the flag out, or start one task per machine",
            )
        return 1, None
    if word == "cpu" or (word == "auto" and not _may_have_accelerators()):
        return len(os.sched_getaffinity(0)), None
    if word == "auto":
        return None, None
    if word in _DEVICES:
        if not _may_have_accelerators():
            raise ConfigError(
                shown, word, "no such device on this machine", "give a number, or cpu"
            )
        return None, _DEVICES[word]
    try:
        number = int(word)
    except ValueError:
        raise ConfigError(
            shown, word, "expected a number of workers, or auto, gpu, cpu or xpu"
        ) from None
    if number < 1:
        raise ConfigError(shown, word, "expected at least 1 worker")
    if (problem := limits.why_not(number)) is not None:
        raise ConfigError(shown, word, problem, "start fewer workers")
    return number, None


def _remark_on_one_cpu(values: Values, placement: clusters.Placement, workers: int) -> None:
    """Open MPI binds a task to a core unless told otherwise, and Slurm gives a task one CPU where CPUs are allocated."""
    if len(os.sched_getaffinity(0)) > 1 or os.cpu_count() == 1:
        return
    hint = "for more, ask for more CPUs per task (srun --cpus-per-task N, mpirun --bind-to none)"
    who = "this worker and its threads have" if workers == 1 else f"these {workers} workers share"
    values.remarks.append(f"{who} one CPU, to which {placement.source} has bound them; {hint}")


def _remark_on_lost_nodes(values: Values, placement: clusters.Placement) -> None:
    """Slurm's default is to end a job that loses a node. Said once, where a batch script's srun runs."""
    job = values.env.get("SLURM_JOB_ID", "")
    if placement.node_rank != 0 or not placement.source.startswith("Slurm"):
        return
    srun = process.find_command("srun", "SLURM_JOB_ID", job)
    if srun is not None and (remark := slurm.ends_with_a_node(srun, values.env)):
        values.remarks.append(remark)


def _secret(values: Values, *, alone: bool, is_first: bool) -> bytes | None:
    """The job's secret: from the flag or a variable, from the user's file, or made for this job alone.

    If there is none, only the first of the tasks that a cluster starts says so.
    """
    insecure = values.switch("insecure")
    name = values["secret_file"]
    if name is not None:
        if insecure:
            raise ConfigError("--insecure", None, "cannot be combined with --secret-file")
        return secret.read_file(name, values.shown("secret_file"))
    if insecure and not alone:
        return None
    if alone:
        return secret.from_environment(values.env) or secret.make()
    if (found := secret.shared(values.env)) is not None:
        return found
    if not is_first:
        return None
    values.remarks.append(
        "no secret: anyone who can reach this job's ports can disturb it, and run code as you if workers use rpc;"
        " make one with `rally secret` and pass it to all nodes (--secret-file), or use --insecure on a trusted network"
    )
    return None


def _requeue_on(values: Values) -> frozenset[int]:
    if not values.is_set("requeue_on"):
        return frozenset()
    shown, text = values.shown("requeue_on"), values.text("requeue_on")
    codes = exit_codes(text, shown)
    requeue.check(values.env, text, shown)
    return codes


def _beside_avoided_hosts(values: Values, placement: clusters.Placement) -> clusters.Placement:
    """In an elastic step of Slurm, nodes do not meet on a host that is left out."""
    listed = _avoid_hosts(values)
    if listed is None or not is_range(values.text("nnodes")):
        return placement
    hosts = slurm.hosts_of_step(values.env)
    if not hosts or placement.master_addr != hosts[0]:
        return placement
    first = own_host.meeting_place(avoid_file.read(Path(listed), "--avoid-hosts"), hosts)
    return replace(placement, master_addr=first) if first else placement


def _avoid_hosts(values: Values) -> str | None:
    return os.path.abspath(values.text("avoid_hosts")) if values.is_set("avoid_hosts") else None


def _logs(values: Values) -> LogConfig:
    ranks_text = values.text("local_ranks_filter")
    ranks: frozenset[int] | None = None
    if ranks_text:
        try:
            ranks = frozenset(int(item) for item in ranks_text.split(","))
        except ValueError:
            raise ConfigError(
                values.shown("local_ranks_filter"), ranks_text, "expected a list such as 0,1,10"
            ) from None
    max_size = values.size("log_max_size")
    if 0 < max_size < _LEAST_LOG_SIZE:
        raise ConfigError(
            values.shown("log_max_size"),
            values.text("log_max_size"),
            f"is {max_size} bytes, expected at least 1K",
            f"with a unit: {max_size}M",
        )
    return LogConfig(
        folder=values["log_dir"] or None,
        redirects=StreamChoice.parse(values.text("redirects"), values.shown("redirects")),
        tee=StreamChoice.parse(values.text("tee"), values.shown("tee")),
        console_ranks=ranks,
        stdout_filters=_words(values.text("duplicate_stdout_filters")),
        stderr_filters=_words(values.text("duplicate_stderr_filters")),
        as_json=values.text("log_format") == "json",
        max_size=max_size,
        prefix_template=values.env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None,
    )


def _metrics(values: Values) -> MetricsPlace | None:
    text = values["metrics"]
    return MetricsPlace.parse(text, values.shown("metrics")) if text else None


def _traces(values: Values) -> str:
    """The exporter that the flag or ``RALLY_TRACES`` names."""
    shown, name = exporters.VARIABLE, values.env.get(exporters.VARIABLE, "")
    if values.is_set("traces"):
        shown, name = values.shown("traces"), values.text("traces")
    if name:
        exporters.check(name, shown)
    return name


def _signals(values: Values) -> tuple[tuple[signal.Signals, ...], tuple[signal.Signals, ...]]:
    """The signals that end the job, and those that are only passed on to workers."""
    ending = _signal_list(values, "signals_to_handle")
    passed = _signal_list(values, "signals_to_pass")
    both = [each.name for each in ending if each in passed]
    if both and values.is_set("signals_to_handle"):
        raise ConfigError(
            values.shown("signals_to_pass"),
            values.text("signals_to_pass"),
            f"{', '.join(both)} is in {values.shown('signals_to_handle')} as well, and would end the job",
            "name it in one of the two",
        )
    return tuple(each for each in ending if each not in passed), passed


def _signal_list(values: Values, dest: str) -> tuple[signal.Signals, ...]:
    text = values.text(dest)
    shown = values.shown(dest)
    found = []
    for word in filter(None, (item.strip().upper() for item in text.split(","))):
        name = word if word.startswith("SIG") else f"SIG{word}"
        if name not in signal.Signals.__members__:
            raise ConfigError(shown, word, "no such signal", "`kill -l` lists the names")
        number = signal.Signals[name]
        if number in {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            raise ConfigError(shown, word, "this signal cannot be forwarded")
        found.append(number)
    return tuple(dict.fromkeys(found))


def _remark_on_what_has_no_effect(values: Values) -> None:
    interval = values.text("monitor_interval")
    try:
        float(interval)
    except ValueError:
        raise ConfigError(
            values.shown("monitor_interval"), interval, "expected a number of seconds"
        ) from None
    reasons = {
        "monitor_interval": "a worker that ends is noticed at once",
        "event_log_handler": "set RALLY_EVENTS=FILE instead",
        "logs_specs": "use --log-dir, --redirects and --tee",
        "run_path": "scripts always run this way",
    }
    for dest, reason in reasons.items():
        flag = BY_NAME["--" + dest.replace("_", "-")]
        value = values[dest]
        if values.is_set(dest) and value not in {
            flag.default,
            "0" * flag.is_switch,
        }:
            values.remarks.append(f"{values.shown(dest)} has no effect: {reason}")


def _words(text: str) -> tuple[str, ...]:
    """``a,b`` as two words; a doubled comma stands for one."""
    held = "\0"
    parts = text.replace(",,", held).split(",")
    return tuple(part.replace(held, ",") for part in parts if part)


def _may_have_accelerators() -> bool:
    return any(Path("/dev", name).exists() for name in _DEVICE_FILES)


def _same_file(a: str, b: str) -> bool:
    found = shutil.which(a) or a
    try:
        # Not resolved: two virtual environments may link to one interpreter.
        return os.path.abspath(found) == os.path.abspath(b)
    except OSError:
        return False
