"""The fields of the script that starts a job on hosts: on the first of them, which starts the others. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rallypoint.launch.hosts import listing, orders

from .request import Request, run_words


@dataclass(frozen=True, kw_only=True, slots=True)
class DetachedOrders:
    """The line that the first host reads.

    Args:
        name: the job's name.
        folder: the working directory.
        env: variables, on top of its own.
        words: the words of ``rally run``.
    """

    name: str
    folder: str
    env: Mapping[str, str]
    words: Sequence[str]

    def to_line(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def from_line(cls, line: bytes) -> DetachedOrders:
        return cls(**json.loads(line))


def fields(request: Request, python: str, folder: str, env: Mapping[str, str]) -> Mapping[str, str]:
    """The values of the template's fields.

    Args:
        request: the job.
        python: the interpreter, at the same path on all hosts.
        folder: the working directory, likewise.
        env: this process's environment.

    Raises:
        ConfigError: the hosts are not a list of hosts.
    """
    hosts = listing.read_list(request.hosts)
    passed = orders.forwarded(env, ())
    *ssh, host, remote = orders.ssh_command(
        hosts[0], request.ssh_options, python, passed, ("submit", "--detached")
    )
    words = (f"--hosts={request.hosts}", *run_words(request))
    told = DetachedOrders(name=request.name, folder=folder, env=passed, words=words)
    return {
        "name": request.name,
        "nodes": str(len(hosts)),
        "gpus": str(request.gpus),
        "ssh": shlex.join(ssh),
        "host": shlex.quote(host),
        "remote": shlex.quote(remote),
        "orders": told.to_line(),
    }
