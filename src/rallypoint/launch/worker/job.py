"""The settings of one worker: descriptors, variables, CPUs. ``config.Job`` has what all workers share."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self


# Asks a worker which exception it is handling; no other use of this signal is known.
ASK_SIGNAL = signal.SIGRTMIN + 21


@dataclass(frozen=True, slots=True)
class WorkerFds:
    """A worker's descriptors: streams, the socket to the supervisor, the line for stacks, and for functions two memory files."""

    stdout: int
    stderr: int
    line: int
    stacks: int
    payload: int | None = None
    result: int | None = None

    @classmethod
    def from_list(cls, fds: Sequence[int]) -> Self:
        return cls(*fds)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart:
    """How to start a worker.

    Args:
        env: variables on top of the fork server's.
        cpus: the CPUs to bind it to, or None for all.
        fds: its descriptors.
        args: its arguments; None: the job's.
        import_changes: what imports before the fork would have changed in its environment; None: unset.
    """

    env: dict[str, str]
    cpus: list[int] | None
    fds: WorkerFds
    args: list[str] | None = None
    import_changes: Mapping[str, str | None] = field(default_factory=dict)
