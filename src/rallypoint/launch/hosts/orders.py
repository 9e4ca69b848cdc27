"""What the supervisor of each host is told, and how ssh is called: pure.

The command that ssh runs holds nothing but the interpreter, because everybody on a host can read command lines. Everything
else is sent through its standard input: a first line with the orders, then heartbeats (``.``) and signals, a line each. Once
the input is silent or closed, the terminal is gone, and the host ends its part of the job. Before the terminal goes silent
on purpose (Ctrl-Z), it says so (``z``); then only the end of the input counts.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from rallypoint.errors import ConfigError
from rallypoint.launch.command_line.flags import FLAGS
from rallypoint.launch.command_line.given import Given

from .listing import Host


# Variables that go to the other hosts. Others belong to a host: PATH, LD_LIBRARY_PATH, CUDA_VISIBLE_DEVICES.
FORWARDED = ("RALLY_*", "PYTHON*", "PET_*", "NCCL_*", "GLOO_*", "TP_*", "TORCH*", "OMP_*")
# The secret goes separately; the others are for processes of this host.
_NOT_FORWARDED = ("RALLY_SECRET*", "RALLY_JOB", "RALLY_HOST_NAME", "TORCHELASTIC_ERROR_FILE")
# Flags that are this command's own.
OWN_FLAGS = frozenset(
    {"--hosts", "--hostfile", "--ssh-options", "--forward-env", "--secret-file", "--avoid-hosts"}
)
# Seconds between two heartbeats to a host, and of silence after which it takes the terminal for gone.
HEARTBEAT = 0.5
SILENCE = 2.5
BEAT, PAUSE = b".", b"z"
# The user's options come first, and ssh takes the first value that it gets.
_SSH_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=3"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """The first line that a host reads.

    Args:
        folder: the working directory.
        env: variables, on top of its own.
        words: the words of ``rally run``.
        secret: the job's; None if it has none.
        token: precedes private messages to the terminal; workers do not know it.
        call_size: bytes of a pickled function call that follow this line; 0: workers run a script.
        path: the caller's ``sys.path``, for a function call.
        answers: the report is wanted as data too, and the results of a call.
    """

    folder: str
    env: Mapping[str, str]
    words: tuple[str, ...]
    secret: str | None
    token: str
    call_size: int = 0
    path: tuple[str, ...] = ()
    answers: bool = False

    def to_line(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Orders:
        fields: dict[str, Any] = json.loads(line)
        tuples = {name: tuple(fields[name]) for name in ("words", "path")}
        return cls(**{**fields, **tuples})


def forwarded(env: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    """The variables that go to the other hosts.

    Args:
        env: this process's environment.
        more: names or patterns that the user adds.
    """

    def goes(name: str) -> bool:
        if any(fnmatchcase(name, each) for each in more):
            return True
        if any(fnmatchcase(name, each) for each in _NOT_FORWARDED):
            return False
        return any(fnmatchcase(name, each) for each in FORWARDED)

    return {name: value for name, value in env.items() if goes(name)}


def ssh_command(
    host: Host,
    options: str,
    python: str,
    env: Mapping[str, str],
    command: Sequence[str] = ("node",),
) -> tuple[str, ...]:
    """The local command that runs a ``rally`` command on a host, by default the one that starts the host's part."""
    try:
        chosen = shlex.split(options)
    except ValueError as error:
        raise ConfigError("--ssh-options", options, str(error)) from None
    # Before it reads its orders, the interpreter has to find this package.
    path = [f"PYTHONPATH={env['PYTHONPATH']}"] if env.get("PYTHONPATH") else []
    there = shlex.join(["env", *path, python, "-m", "rallypoint", *command])
    return ("ssh", "-T", *chosen, *_SSH_OPTIONS, host.name, f"exec {there}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the nodes of the job meet.

    Args:
        least: the fewest hosts.
        master: the first host as the others reach it.
        port: the store's port there.
        run_id: the id of this start.
    """

    least: int
    master: str
    port: int
    run_id: str


def least_hosts(given: Given, num_hosts: int) -> int:
    """The fewest hosts that may run the job, from ``--nnodes``.

    Raises:
        ConfigError: flags contradict the list of hosts.
    """
    for name in ("--node-rank", "--standalone", "--local-addr", "--bind"):
        if name in given.values:
            raise ConfigError(
                name, None, "is for one node, but --hosts starts several: leave it out"
            )
    text = given.values.get("--nnodes")
    if text is None:
        return num_hosts
    least, _, most = text.partition(":")
    if not (least.isdigit() and (most or least).isdigit()) or int(most or least) != num_hosts:
        hint = f"leave it out, or --nnodes MIN:{num_hosts} for a job that survives lost hosts"
        raise ConfigError("--nnodes", text, f"there are {num_hosts} hosts", hint)
    return int(least)


def words_for(given: Given, hosts: Sequence[Host], index: int, meeting: Meeting) -> tuple[str, ...]:
    """The words of ``rally run`` on one of the hosts."""
    values = {name: text for name, text in given.values.items() if name not in OWN_FLAGS}
    host = hosts[index]
    if host.workers is not None:
        values["--nproc-per-node"] = str(host.workers)
    if len(hosts) > 1:
        values.update(_meeting_words(values, len(hosts), index, meeting))
    switches = {flag.name for flag in FLAGS if flag.is_switch}
    flags = [name if name in switches else f"{name}={text}" for name, text in values.items()]
    return (*flags, "--", *given.target)


def _meeting_words(
    values: Mapping[str, str], num_hosts: int, index: int, meeting: Meeting
) -> dict[str, str]:
    elastic = meeting.least < num_hosts
    count = f"{meeting.least}:{num_hosts}" if elastic else str(num_hosts)
    words = {"--nnodes": count, "--rdzv-id": values.get("--rdzv-id", meeting.run_id)}
    if "--rdzv-endpoint" in values:
        return words
    master = f"[{meeting.master}]" if ":" in meeting.master else meeting.master
    if elastic or "--rdzv-backend" in values:
        return words | {"--rdzv-endpoint": f"{master}:{meeting.port}"}
    port = values.get("--master-port", str(meeting.port))
    addr = values.get("--master-addr", meeting.master)
    return words | {"--node-rank": str(index), "--master-addr": addr, "--master-port": port}


def for_host(orders: Orders, words: tuple[str, ...]) -> Orders:
    """The same orders with other words."""
    return replace(orders, words=words)
