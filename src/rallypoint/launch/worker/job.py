"""What is one worker's own: its descriptors, variables, CPUs. The job, which all share, is the config's."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


# By this one a worker is asked which exception it handles; nobody else is known to use it.
ASK_SIGNAL = signal.SIGRTMIN + 21


@dataclass(frozen=True, slots=True)
class WorkerFds:
    """A worker's descriptors: streams, its line to the supervisor, and for functions two memory files."""

    stdout: int
    stderr: int
    line: int
    payload: int | None = None
    result: int | None = None

    @classmethod
    def from_list(cls, fds: Sequence[int]) -> Self:
        return cls(*fds)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart:
    """What is one worker's own: variables on top of the fork server's, CPUs to be bound to, descriptors; arguments."""

    env: dict[str, str]
    cpus: list[int] | None
    fds: WorkerFds
    args: list[str] | None = None
