"""From flags and environment to a :class:`~rallypoint.launch.config.LaunchConfig`.

Precedence: flag, then ``PET_*``, then what the cluster says, then default. What torchrun accepts and
what has no meaning here is accepted, with a remark that says why.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shutil
import signal
import stat
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rallypoint._core import limits, process, secret
from rallypoint.errors import ConfigError
from rallypoint.rendezvous.endpoint import (
    BACKEND_ALIASES,
    Endpoint,
    canonical_backend,
    parse_endpoint,
)
from rallypoint.rendezvous.parameters import RendezvousParameters
from rallypoint.rendezvous.registry import BUILT_IN, rendezvous_handler_registry

from .config import (
    DEFAULT_MASTER_PORT,
    DEFAULT_RENDEZVOUS_PORT,
    DEFAULT_SHUTDOWN_TIMEOUT,
    LaunchConfig,
    LogConfig,
    RendezvousConfig,
    StartMethod,
    StreamChoice,
    Target,
    TargetKind,
)
from .flags import BY_NAME, Given, resolve
from .placement import cluster_env
from .placement.numa import NumaBinding


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

_TRUTH = {
    **dict.fromkeys(("true", "1", "t", "yes", "y"), True),
    **dict.fromkeys(("false", "0", "f", "no", "n"), False),
}
# Names in --rdzv-conf that mean the same as ours.
_CONF_ALIASES = {
    "timeout": "join_timeout",
    "last_call_timeout": "last_call",
    "heartbeat_timeout": "lease",
}
_ENDPOINT_EXAMPLES = {
    "etcd": "--rdzv-endpoint etcd://HOST:2379",
    "file": "--rdzv-endpoint file:///a/folder/that/all/nodes/share",
}

_PYTHON = re.compile(r"python[0-9.]*|pypy[0-9.]*", re.ASCII)

# Which flags say where this node stands; with one of them set the cluster is not asked.
_NODE_FLAGS = ("nnodes", "node_rank", "master_addr", "rdzv_endpoint", "standalone")


def config_from(given: Given, env: Mapping[str, str]) -> tuple[LaunchConfig, list[str]]:
    """The launch a command line asks for, and remarks for the person who wrote it.

    Raises:
        ConfigError: something cannot be, named as it was spelled.
    """
    values, origins = resolve(given, env)
    return _Settings(values, origins, env).config(given.target)


class _Settings:
    """One command line on its way to a config: values, where they came from, remarks so far."""

    def __init__(
        self, values: dict[str, str | None], origins: dict[str, str], env: Mapping[str, str]
    ) -> None:
        self._values = values
        self._origins = origins
        self._env = env
        self._remarks: list[str] = []

    def config(self, words: tuple[str, ...]) -> tuple[LaunchConfig, list[str]]:
        target = self._target(words)
        start_method, python = self._start(target)
        placement = None
        if not any(self._is_set(name) for name in _NODE_FLAGS):
            wanted = cluster_env.may_need_ancestors(self._env)
            placement = cluster_env.detect(self._env, process.ancestors() if wanted else ())
        if placement is not None:
            self._remarks.append(placement.describe())
        workers, accelerator = self._workers(placement)
        min_nodes, num_nodes, rendezvous, addr, port = self._nodes(placement)
        several_here = placement is not None and placement.one_worker_per_task
        config = LaunchConfig(
            target=target,
            rendezvous=rendezvous,
            logs=self._logs(),
            workers_per_node=workers,
            accelerator=accelerator,
            num_nodes=num_nodes,
            min_nodes=min_nodes,
            max_restarts=self._int("max_restarts", least=0),
            master_addr=addr,
            master_port=port,
            local_addr=self._values["local_addr"],
            role=self._text("role"),
            shutdown_timeout=self._shutdown_timeout(),
            cause_timeout=self._seconds(self._text("cause_timeout"), "--cause-timeout"),
            signals=tuple(each for each in self._signals() if each not in self._passed_signals()),
            passed_signals=self._passed_signals(),
            start_method=start_method,
            preload=tuple(name for name in self._text("preload").split(",") if name),
            unbuffered=self._switch("unbuffered"),
            block_buffered=self._block_buffered(),
            templates=self._switch("templates"),
            virtual_local_rank=self._switch("virtual_local_rank"),
            numa_binding=cast("NumaBinding | None", self._values["numa_binding"]),
            local_rank_base=placement.local_rank if placement and several_here else 0,
            local_world_size=placement.tasks_per_machine if placement and several_here else None,
            group_rank=placement.machine_rank if placement and several_here else None,
            group_world_size=placement.num_machines if placement and several_here else None,
            python=python,
            bind=self._values["bind"],
            secret=self._secret(alone=num_nodes == 1 and rendezvous.plug_in is None),
        )
        self._remark_on_what_has_no_effect()
        return config, self._remarks

    # -- reading values -----------------------------------------------------------------------

    def _is_set(self, dest: str) -> bool:
        if dest == "standalone":
            return self._switch(dest)
        return self._origins[dest] != "default"

    def _shown(self, dest: str) -> str:
        """The name the user used: the flag, or the variable."""
        origin = self._origins[dest]
        return origin if origin.startswith("PET_") else "--" + dest.replace("_", "-")

    def _text(self, dest: str) -> str:
        return self._values[dest] or ""

    def _switch(self, dest: str) -> bool:
        return int(self._text(dest) or "0") != 0

    def _int(self, dest: str, *, least: int) -> int:
        text = self._text(dest)
        try:
            number = int(text)
        except ValueError:
            raise ConfigError(self._shown(dest), text, "expected a whole number") from None
        if number < least:
            raise ConfigError(self._shown(dest), text, f"expected {least} or more")
        return number

    # -- what to run --------------------------------------------------------------------------

    def _target(self, words: tuple[str, ...]) -> Target:
        if not words:
            raise ConfigError(
                "run", None, "no script given", "rally run [flags] script.py [its arguments]"
            )
        name, args = words[0], tuple(words[1:])
        if self._switch("no_python"):
            if self._switch("module"):
                raise ConfigError("--no-python", None, "cannot be combined with --module")
            found = shutil.which(name, path=self._env.get("PATH"))
            if found is None:
                raise ConfigError("program", name, "not found, or not executable", "check the path")
            return Target(kind=TargetKind.PROGRAM, name=name, args=args)
        if self._switch("module"):
            return Target(kind=TargetKind.MODULE, name=name, args=args)
        self._check_not_a_program(name, args)
        _check_script(name)
        return Target(kind=TargetKind.SCRIPT, name=name, args=args)

    def _check_not_a_program(self, name: str, args: tuple[str, ...]) -> None:
        """`rally run python t.py`, `rally run ./a.out`: what is meant, and how to write that."""
        if _PYTHON.fullmatch(os.path.basename(name)) and not os.path.isdir(name):
            rest = " ".join(args)[:60] or "script.py"
            raise ConfigError(
                "script",
                name,
                "workers are Python already",
                f"leave {os.path.basename(name)} out: rally run … {rest}; or add --no-python",
            )
        if "/" not in name and not os.path.exists(name):
            found = shutil.which(name, path=self._env.get("PATH"))
            if found is not None:
                raise ConfigError(
                    "script",
                    name,
                    f"no such file; {found} is a program",
                    "add --no-python for that",
                )
        elif _is_machine_code(name):
            raise ConfigError("script", name, "a program, not a Python script", "add --no-python")

    def _start(self, target: Target) -> tuple[StartMethod, str | None]:
        word = self._values["start_method"]
        methods = {"spawn": StartMethod.EXEC, "fork": StartMethod.FORKSERVER}
        if word in methods:
            self._remarks.append(
                f"{self._shown('start_method')} {word}: scripts are started by {methods[word]} here"
            )
        method = methods.get(word or "") or StartMethod(word or StartMethod.FORKSERVER)
        python = self._env.get("PYTHON_EXEC")
        if python and not _same_file(python, sys.executable):
            if shutil.which(python, path=self._env.get("PATH")) is None:
                problem = "may not be executed" if os.path.exists(python) else "no such interpreter"
                raise ConfigError("PYTHON_EXEC", python, problem)
            return StartMethod.EXEC, python
        if target.kind is TargetKind.PROGRAM:
            method = StartMethod.EXEC
        if method is StartMethod.EXEC and self._text("preload"):
            self._remarks.append("--preload has no effect: workers are not forks of one process")
        return method, None

    def _block_buffered(self) -> bool:
        if self._switch("block_buffered") and self._switch("unbuffered"):
            raise ConfigError("--block-buffered", None, "cannot be combined with --unbuffered")
        return self._switch("block_buffered")

    # -- size ---------------------------------------------------------------------------------

    def _workers(self, placement: cluster_env.Placement | None) -> tuple[int | None, str | None]:
        """Number of workers here, or None and the type of accelerator to count."""
        word = self._text("nproc_per_node").strip()
        shown = self._shown("nproc_per_node")
        if placement is not None and placement.one_worker_per_task:
            if self._is_set("nproc_per_node") and word != "1":
                raise ConfigError(
                    shown,
                    word,
                    f"{placement.source} has started {placement.tasks_per_machine} tasks on this"
                    " machine already, each is one worker",
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

    def _num_nodes(self) -> tuple[int, int]:
        text = self._text("nnodes")
        shown = self._shown("nnodes")
        low, colon, high = text.partition(":")
        try:
            least, most = int(low), int(high if colon else low)
        except ValueError:
            raise ConfigError(shown, text, "expected a number of nodes") from None
        if not 0 < least <= most:
            raise ConfigError(shown, text, "expected at least 1 node, and MIN no larger than MAX")
        return least, most

    def _nodes(
        self, placement: cluster_env.Placement | None
    ) -> tuple[int | None, int, RendezvousConfig, str | None, int | None]:
        """Fewest and most nodes, how they meet, and MASTER_ADDR and MASTER_PORT as far as they are given."""
        least, num_nodes = self._num_nodes()
        if placement is not None:
            least = num_nodes = placement.num_nodes
        port = None if self._values["master_port"] is None else self._port("master_port")
        backend = self._backend(least != num_nodes)
        if self._switch("standalone"):
            least, num_nodes, backend = 1, 1, "tcpstore"
        run_id = self._text("rdzv_id")
        if backend not in BUILT_IN:
            return self._plugged(backend, run_id, least, num_nodes)
        options = self._rendezvous_options()
        if num_nodes == 1:
            # As torchrun: with nothing said about a meeting point, a name and a port of its own.
            alone = self._switch("standalone") or (
                backend == "static" and not self._text("rdzv_endpoint") and port is None
            )
            if alone and (run_id == "none" or self._switch("standalone")):
                run_id = (placement.run_id if placement else None) or str(uuid.uuid4())
            # Checked even if it has no effect here: the same line is to work with more nodes.
            endpoint = self._endpoint(backend) if self._text("rdzv_endpoint") else None
            addr: str | None = None
            if backend != "static":
                port = None
            elif endpoint is not None:
                addr, port = endpoint.hosts[0].host, endpoint.hosts[0].port
            elif port is not None:
                addr = self._text("master_addr")
            return None, 1, RendezvousConfig(run_id=run_id), addr, port
        node_rank: int | None = self._int("node_rank", least=0)
        if placement is not None:
            host = placement.master_addr or "127.0.0.1"
            port = port or placement.master_port or DEFAULT_MASTER_PORT
            node_rank = placement.node_rank
            run_id = placement.run_id or run_id if run_id == "none" else run_id
            rendezvous = RendezvousConfig(
                run_id=run_id, node_rank=node_rank, host=host, port=port, **options
            )
            return None, num_nodes, rendezvous, host if node_rank == 0 else None, port
        if backend == "static":
            if least != num_nodes:
                raise ConfigError(
                    self._shown("nnodes"),
                    self._text("nnodes"),
                    "with --rdzv-backend static the number of nodes is fixed",
                    "leave --rdzv-backend out, or give c10d, etcd or file",
                )
            if not self._is_set("node_rank"):
                self._remarks.append("--node-rank is not given: this is node 0")
        else:
            if self._is_set("node_rank") and node_rank:
                why = f"with {self._shown('nnodes')} {self._text('nnodes')}"
                if backend != "tcpstore" or self._is_set("rdzv_backend"):
                    why = f"where nodes meet by {backend}"
                self._remarks.append(
                    f"{self._shown('node_rank')} {node_rank} has no effect: {why} ranks are assigned"
                )
            node_rank = None
        return self._meeting(least, num_nodes, backend, run_id, node_rank, port, options)

    def _backend(self, a_range: bool) -> str:
        """Which rendezvous: as the flag says; else as the endpoint's URL, a range of nodes or given ranks do."""
        if self._is_set("rdzv_backend"):
            name = self._text("rdzv_backend")
            known = {*BACKEND_ALIASES, *BACKEND_ALIASES.values(), "static", "file", "rallypoint"}
            if name not in known:
                plugged = {*rendezvous_handler_registry.known()} - {*BUILT_IN}
                if name in plugged:
                    return name
                known |= plugged
                near = difflib.get_close_matches(name, known, n=1)
                raise ConfigError(
                    self._shown("rdzv_backend"),
                    name,
                    f"no such rendezvous (known: {', '.join(sorted(known))})",
                    f"did you mean {near[0]}?" if near else "",
                )
            return "tcpstore" if name == "rallypoint" else canonical_backend(name)
        text = self._text("rdzv_endpoint")
        if "://" in text:
            endpoint = parse_endpoint(text, flag=self._shown("rdzv_endpoint"))
            if endpoint.backend != "tcpstore" or len(endpoint.hosts) > 1:
                return endpoint.backend
        # The same line on every node: nothing tells one from another. As soon as one thing does, ranks are given.
        given = self._is_set("node_rank") or self._is_set("master_addr")
        several = self._num_nodes()[1] > 1
        return "tcpstore" if a_range or (text and several and not given) else "static"

    def _meeting(
        self,
        least: int,
        num_nodes: int,
        backend: str,
        run_id: str,
        node_rank: int | None,
        port: int | None,
        options: dict[str, Any],
    ) -> tuple[int | None, int, RendezvousConfig, str | None, int | None]:
        """Where the nodes meet."""
        default = DEFAULT_MASTER_PORT if backend == "static" else DEFAULT_RENDEZVOUS_PORT
        min_nodes = None if node_rank is not None else least
        if not self._text("rdzv_endpoint"):
            if backend != "static":
                raise ConfigError(
                    "--rdzv-endpoint",
                    None,
                    "several nodes need a place that all can reach",
                    _ENDPOINT_EXAMPLES.get(backend, f"--rdzv-endpoint HOST:{default}"),
                )
            host = self._text("master_addr")
            rendezvous = RendezvousConfig(
                run_id=run_id, node_rank=node_rank, host=host, port=port or default, **options
            )
            return min_nodes, num_nodes, rendezvous, host, port or default
        endpoint = self._endpoint(backend)
        addr = self._text("master_addr") if self._is_set("master_addr") else None
        if endpoint.backend in {"etcd", "file"}:
            rendezvous = RendezvousConfig(
                run_id=run_id, node_rank=node_rank, host="", endpoint=endpoint, **options
            )
            return min_nodes, num_nodes, rendezvous, None, port
        first = endpoint.hosts[0]
        if any(each.port == 0 for each in endpoint.hosts):
            raise ConfigError(
                self._shown("rdzv_endpoint"),
                self._text("rdzv_endpoint"),
                "several nodes need a port that all know, not 0 (any free one)",
                f"--rdzv-endpoint {first.host}:{default}",
            )
        rendezvous = RendezvousConfig(
            run_id=run_id,
            node_rank=node_rank,
            host=first.host,
            port=first.port,
            endpoint=endpoint,
            **options,
        )
        # Where ranks are assigned any node may be node 0: it tells its own address.
        return (
            min_nodes,
            num_nodes,
            rendezvous,
            None if node_rank is None else addr or first.host,
            first.port,
        )

    def _plugged(
        self, backend: str, run_id: str, least: int, num_nodes: int
    ) -> tuple[int | None, int, RendezvousConfig, str | None, int | None]:
        """A plug-in decides who meets; its options are its own, and ours are taken from among them."""
        conf = dict(self._conf_items())
        if self._is_set("node_rank"):
            conf.setdefault("rank", self._text("node_rank"))
        parameters = RendezvousParameters(
            backend,
            self._text("rdzv_endpoint"),
            run_id,
            least,
            num_nodes,
            self._values["local_addr"],
            **conf,
        )
        rendezvous = RendezvousConfig(
            run_id=run_id,
            node_rank=None,
            host="",
            plug_in=parameters,
            **self._rendezvous_options(all_known=False),
        )
        return least, num_nodes, rendezvous, None, None

    def _endpoint(self, backend: str) -> Endpoint:
        # Given and assigned ranks meet at one port by default: so nodes that differ in that are told.
        alone = self._num_nodes()[1] == 1
        return parse_endpoint(
            self._text("rdzv_endpoint").strip(),
            backend=backend,
            default_port=DEFAULT_MASTER_PORT if backend == "static" and alone else None,
            flag=self._shown("rdzv_endpoint"),
        )

    def _port(self, dest: str) -> int:
        port = self._int(dest, least=0)
        if port > 65535:
            raise ConfigError(self._shown(dest), str(port), "expected a port from 0 to 65535")
        return port

    def _conf_items(self) -> list[tuple[str, str]]:
        """``--rdzv-conf`` as names and values."""
        found = []
        for item in filter(None, (part.strip() for part in self._text("rdzv_conf").split(","))):
            name, equals, value = item.partition("=")
            if not equals:
                raise ConfigError(self._shown("rdzv_conf"), item, "expected NAME=VALUE,…")
            found.append((name, value))
        return found

    def _rendezvous_options(self, *, all_known: bool = True) -> dict[str, Any]:
        """``--rdzv-conf`` and what else a meeting needs, as fields of :class:`RendezvousConfig`."""
        shown = self._shown("rdzv_conf")
        found: dict[str, Any] = {}
        without_effect = []
        for name, value in self._conf_items():
            item = f"{name}={value}"
            # torchrun's static rendezvous calls it timeout, its dynamic one heartbeat_timeout and so on.
            name = _CONF_ALIASES.get(name, name)
            if name in {"join_timeout", "last_call", "lease"}:
                try:
                    seconds = float(value)
                except ValueError:
                    raise ConfigError(shown, item, "expected a number of seconds") from None
                if not 0 < seconds < math.inf:
                    raise ConfigError(shown, item, "expected more than 0 seconds")
                found[name] = seconds
            elif name in {"is_host", "split_brain_guard"}:
                if value.lower() not in _TRUTH:
                    raise ConfigError(shown, item, f"expected one of {', '.join(_TRUTH)}")
                found[name] = _TRUTH[value.lower()]
            elif name == "label":
                found[name] = value
            else:
                without_effect.append(name)
        if without_effect and all_known:
            self._remarks.append(
                f"{shown}: {', '.join(without_effect)} has no effect here (known: join_timeout,"
                " last_call_timeout, lease, is_host, label, split_brain_guard)"
            )
        return found

    # -- who takes part -----------------------------------------------------------------------

    def _secret(self, *, alone: bool) -> bytes | None:
        """The job's secret: as the flag or a variable says, of the user's file, or one for this job alone."""
        insecure = self._switch("insecure")
        name = self._values["secret_file"]
        if name is not None:
            if insecure:
                raise ConfigError("--insecure", None, "cannot be combined with --secret-file")
            return secret.read_file(name, self._shown("secret_file"))
        if insecure and not alone:
            return None
        if alone:
            return secret.from_environment(self._env) or secret.make()
        if (found := secret.shared(self._env)) is not None:
            return found
        self._remarks.append(
            "no secret: anybody who can reach this job's ports can change what its nodes agree on, and run code"
            " as you where workers use rpc; make one with `rally secret` and give it to all nodes (--secret-file),"
            " or say --insecure on a network that you trust"
        )
        return None

    # -- the rest -----------------------------------------------------------------------------

    def _logs(self) -> LogConfig:
        ranks_text = self._text("local_ranks_filter")
        ranks: frozenset[int] | None = None
        if ranks_text:
            try:
                ranks = frozenset(int(item) for item in ranks_text.split(","))
            except ValueError:
                raise ConfigError(
                    self._shown("local_ranks_filter"), ranks_text, "expected a list such as 0,1,10"
                ) from None
        return LogConfig(
            folder=self._values["log_dir"] or None,
            redirects=StreamChoice.parse(self._text("redirects"), self._shown("redirects")),
            tee=StreamChoice.parse(self._text("tee"), self._shown("tee")),
            console_ranks=ranks,
            stdout_filters=_words(self._text("duplicate_stdout_filters")),
            stderr_filters=_words(self._text("duplicate_stderr_filters")),
            prefix_template=self._env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None,
        )

    def _shutdown_timeout(self) -> float:
        text = self._values["shutdown_timeout"]
        shown = self._shown("shutdown_timeout")
        if text is None:
            shown = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
            text = self._env.get(shown)
            if text is None:
                return DEFAULT_SHUTDOWN_TIMEOUT
        return self._seconds(text, shown)

    def _seconds(self, text: str, shown: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < math.inf:
            raise ConfigError(shown, text, "expected a number of seconds, 0 or more")
        return seconds

    def _signals(self) -> tuple[signal.Signals, ...]:
        return self._signal_list("signals_to_handle")

    def _passed_signals(self) -> tuple[signal.Signals, ...]:
        passed = self._signal_list("signals_to_pass")
        both = [each.name for each in self._signals() if each in passed]
        if both and self._is_set("signals_to_handle"):
            raise ConfigError(
                self._shown("signals_to_pass"),
                self._text("signals_to_pass"),
                f"{', '.join(both)} cannot both end the job ({self._shown('signals_to_handle')}) and not",
                "name it in one of the two",
            )
        return passed

    def _signal_list(self, dest: str) -> tuple[signal.Signals, ...]:
        text = self._text(dest)
        shown = self._shown(dest)
        found = []
        for word in filter(None, (item.strip().upper() for item in text.split(","))):
            name = word if word.startswith("SIG") else f"SIG{word}"
            if name not in signal.Signals.__members__:
                raise ConfigError(shown, word, "no such signal", "names as in `kill -l`: SIGUSR1")
            number = signal.Signals[name]
            if number in {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
                raise ConfigError(shown, word, "this signal cannot be passed on")
            found.append(number)
        return tuple(dict.fromkeys(found))

    def _remark_on_what_has_no_effect(self) -> None:
        interval = self._text("monitor_interval")
        try:
            float(interval)
        except ValueError:
            raise ConfigError(
                self._shown("monitor_interval"), interval, "expected a number of seconds"
            ) from None
        reasons = {
            "monitor_interval": "workers' ends are events here, nothing is polled",
            "event_log_handler": "what happened is in report.json",
            "logs_specs": "--log-dir, --redirects and --tee say where logs go",
            "run_path": "scripts run that way here anyhow",
        }
        for dest, reason in reasons.items():
            flag = BY_NAME["--" + dest.replace("_", "-")]
            value = self._values[dest]
            if self._origins[dest] != "default" and value not in {
                flag.default,
                "0" * flag.is_switch,
            }:
                self._remarks.append(f"{self._shown(dest)} has no effect: {reason}")


def _words(text: str) -> tuple[str, ...]:
    """``a,b`` as two words; a doubled comma stands for one."""
    held = "\0"
    parts = text.replace(",,", held).split(",")
    return tuple(part.replace(held, ",") for part in parts if part)


def _check_script(name: str) -> None:
    path = Path(name)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte in it
        raise ConfigError("script", name, "no such file", _nearest_file(path)) from None
    except OSError as error:
        raise ConfigError(
            "script", name, f"cannot be read: {error.strerror}", "check the path and its folders"
        ) from None
    if not os.access(path, os.R_OK):
        raise ConfigError("script", name, "no permission to read it", f"chmod u+r {name}")
    if stat.S_ISDIR(mode) and not (path / "__main__.py").is_file():
        raise ConfigError(
            "script", name, "a folder without a __main__.py cannot be run", "name a file in it"
        )


def _is_machine_code(name: str) -> bool:
    try:
        with open(name, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except (OSError, ValueError):
        return False


def _nearest_file(path: Path) -> str:
    kinds = {path.suffix, ".py"}
    try:
        there = sorted(item.name for item in path.parent.iterdir() if item.suffix in kinds)
    except (OSError, ValueError):
        return f"there is no folder {path.parent}"
    near = difflib.get_close_matches(path.name, there, n=1)
    if near:
        return f"did you mean {path.parent / near[0]}?"
    return f"looked in {path.parent.absolute()}"


def _may_have_accelerators() -> bool:
    return any(Path("/dev", name).exists() for name in _DEVICE_FILES)


def _same_file(a: str, b: str) -> bool:
    found = shutil.which(a) or a
    try:
        # Not resolved: two virtual environments may link to one interpreter.
        return os.path.abspath(found) == os.path.abspath(b)
    except OSError:
        return False
