"""What a worker is told: the job all workers share, and what is one worker's own."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rallypoint.launch.config import TargetKind


# By this one a worker is asked which exception it handles; nobody else is known to use it.
ASK_SIGNAL = signal.SIGRTMIN + 21


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker of a launch runs; travels to the fork server as JSON.

    Args:
        kind: script, module, program or function.
        name: as the user gave it.
        args: what follows it on the command line.
        path: function launches: the caller's ``sys.path``.
        python: another interpreter than this one, or None.
        unbuffered: stdout is unbuffered, as under ``python -u``.
        block_buffered: stdout is buffered in blocks, as Python does for files and pipes.
    """

    kind: TargetKind
    name: str
    args: tuple[str, ...]
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
