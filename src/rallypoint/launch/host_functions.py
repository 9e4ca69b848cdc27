"""Function launches over several hosts: ``launch_subprocesses(…, hosts=…)``.

The hosts' supervisors are those of ``rally run --hosts`` (:mod:`.hosts`). The call goes to each of them through ssh's
stdin, after the supervisor's orders, and the results come back through ssh's stdout.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from rallypoint.errors import ConfigError, LaunchError, WorkersFailed

from .command_line.given import Given
from .config import StartMethod
from .hosts import listing
from .hosts.call_files import Answer
from .hosts.launcher import Call, Ended, run_on_hosts
from .hosts.listing import Host
from .multiprocess_config import LAUNCH_METHODS, MultiprocessConfig
from .output.report import FailureReport
from .worker import payload


_log = logging.getLogger(__name__)

# What each worker would otherwise import itself.
PRELOAD = ("cloudpickle", "rallypoint.launch.worker.payload", "rallypoint.parallel")


@runtime_checkable
class Cluster(Protocol):
    """Something that has hosts of its own: :mod:`rallypoint.ray`, and its ``Bundles``."""

    def call_on_hosts(self, call: payload.Call, cfg: MultiprocessConfig) -> list[Any]:
        """Make a call on all workers; return their results by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLaunch:
    """A function launch over hosts.

    Args:
        hosts: the hosts, with the number of workers on each.
        cfg: the config, with the size of the job.
        ssh_options: options for ssh, written as in a shell.
    """

    hosts: tuple[Host, ...]
    cfg: MultiprocessConfig
    ssh_options: str = ""


def host_launch(hosts: Sequence[str], cfg: MultiprocessConfig, ssh_options: str = "") -> HostLaunch:
    """The launch that the arguments ask for.

    Raises:
        ConfigError: they contradict one another.
    """
    if isinstance(hosts, str):
        hint = f"hosts={hosts.split(',')!r}"
        raise ConfigError("hosts", hosts, "expected a sequence of hosts", hint)
    if not hasattr(hosts, "__iter__"):
        hint = "for a Ray cluster: from rallypoint import ray"
        raise ConfigError("hosts", hosts, "expected a sequence of hosts", hint)
    if not all(str(each).strip() for each in hosts):
        raise ConfigError("hosts", hosts, "one of the names is empty", "leave it out")
    found = listing.read_list(",".join(map(str, hosts)), "hosts")
    check_config(cfg)
    sized = _sized(found, cfg)
    world_size = sum(each.workers or 0 for each in sized)
    if cfg.world_size not in {None, world_size}:
        counts = ", ".join(f"{each.name}:{each.workers}" for each in sized)
        problem = f"the hosts run {world_size} workers ({counts})"
        raise ConfigError("world_size", cfg.world_size, problem)
    cfg = replace(cfg, world_size=world_size, local_world_size=None)
    return HostLaunch(hosts=sized, cfg=cfg, ssh_options=ssh_options)


def check_config(cfg: MultiprocessConfig) -> None:
    """Check that workers on other hosts can have this config.

    Raises:
        ConfigError: they cannot.
    """
    if LAUNCH_METHODS[cfg.launch_method] is StartMethod.FORK:
        raise ConfigError(
            "launch_method", "fork", "a fork of this process cannot run on other hosts"
        )
    for name in ("rank", "local_rank"):
        if getattr(cfg, name) is not None:
            value = getattr(cfg, name)
            raise ConfigError(name, value, "a launch assigns the ranks of its workers")
    if cfg.init_method != "env://":
        hint = "leave it out; master_addr and master_port may be set"
        raise ConfigError("init_method", cfg.init_method, "expected env:// with hosts", hint)


def _sized(hosts: Sequence[Host], cfg: MultiprocessConfig) -> tuple[Host, ...]:
    """Each host with its number of workers."""
    unset = [each for each in hosts if each.workers is None]
    share = cfg.local_world_size
    if unset and share is None:
        if cfg.world_size is None:
            hint = f"hosts=[{unset[0].name + ':8'!r}], or local_world_size, or world_size"
            raise ConfigError("hosts", unset[0].name, "has no number of workers", hint)
        left = cfg.world_size - sum(each.workers or 0 for each in hosts)
        share, rest = divmod(left, len(unset))
        if share < 1 or rest:
            problem = f"cannot be divided among the {len(unset)} hosts without a number of workers"
            raise ConfigError("world_size", cfg.world_size, problem)
    return tuple(each if each.workers else Host(each.name, share) for each in hosts)


def run(launch: HostLaunch, call: payload.Call, env: Mapping[str, str]) -> Ended:
    """Make the call on all hosts.

    Raises:
        ConfigError: the call cannot be pickled, or a setting cannot work.
    """
    return run_on_hosts(_given(launch, call), env, _say, packed(launch.cfg, call))


def _given(launch: HostLaunch, call: payload.Call) -> Given:
    """The launch as a command line would say it."""
    cfg = launch.cfg
    values = {
        "--hosts": ",".join(f"{_bracketed(each.name)}:{each.workers}" for each in launch.hosts),
        "--start-method": LAUNCH_METHODS[cfg.launch_method].value,
        "--preload": ",".join(PRELOAD),
    }
    if launch.ssh_options:
        values["--ssh-options"] = launch.ssh_options
    if cfg.master_addr is not None:
        values["--master-addr"] = cfg.master_addr
    if cfg.master_port:
        values["--master-port"] = str(cfg.master_port)
    return Given(values, (payload.name_of(call.func),))


def _bracketed(name: str) -> str:
    user, at, bare = name.rpartition("@")
    return f"{user}{at}[{bare}]" if ":" in bare else name


def packed(cfg: MultiprocessConfig, call: payload.Call) -> Call:
    """A call for workers on other hosts.

    Raises:
        ConfigError: it cannot be pickled.
    """
    facts = payload.CallerFacts(
        # Each worker has these in its environment.
        cfg=replace(cfg, master_addr=None, master_port=None),
        argv=tuple(sys.argv),
        log_level=logging.getLogger().level,
    )
    fd = payload.pack(call, facts, installed_only=True)
    with open(fd, "rb") as file:
        file.seek(0)
        data = file.read()
    return Call(data=data, path=tuple(str(entry) for entry in sys.path))


def _say(text: str, *, bare: bool = False) -> None:
    _log.warning("%s", text)


def results(ended: Ended, launch: HostLaunch) -> list[Any]:
    """The results of all ranks, in rank order.

    Raises:
        WorkersFailed: a worker failed.
        LaunchError: a host could not take part, or a result cannot be unpickled here.
    """
    answers = [
        Answer.from_bytes(bytes(part.answer)) if part.answer else Answer() for part in ended.parts
    ]
    report = next((each.report for each in answers if each.report is not None), None)
    if report is not None:
        raise WorkersFailed(FailureReport.from_json(report))
    if ended.verdict.exit_code:
        why = "; ".join(ended.verdict.remarks) or "a host refused the launch: see its output"
        raise LaunchError(why)
    found = [result for each in answers for result in each.results]
    assert len(found) == launch.cfg.world_size
    return unpacked(found)


def unpacked(found: Sequence[bytes]) -> list[Any]:
    """The results of all ranks, in rank order, from their pickles.

    Raises:
        WorkersFailed: a worker has left no result.
        LaunchError: a result cannot be unpickled here.
    """
    silent = [rank for rank, data in enumerate(found) if not data]
    if silent:
        reason = f"rank {silent[0]} exited with code 0 before its function returned; does it call os._exit?"
        raise WorkersFailed(FailureReport(failures=(), world_size=len(found), reason=reason))
    return [payload.unpack_result(rank, data) for rank, data in enumerate(found)]
