"""The settings of one worker: descriptors, variables, CPUs. ``config.Job`` has what all workers share."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self


# Asks a worker which exception it is handling; no other use of this signal is known.
ASK_SIGNAL = signal.SIGRTMIN + 21
# A worker's own descriptors are the highest below this, or below its limit.
_HIGHEST = 1024
_ROOM = 8


@dataclass(frozen=True, slots=True)
class WorkerFds:
    """A worker's descriptors.

    Args:
        stdout: a stream.
        stderr: a stream.
        line: the socket to the supervisor.
        stacks: the pipe for its stacks.
        questions: the socket on which it is asked about its collectives.
        payload: for functions: a memory file.
        result: likewise.
    """

    stdout: int
    stderr: int
    line: int
    stacks: int
    questions: int
    payload: int | None = None
    result: int | None = None

    @classmethod
    def from_list(cls, fds: Sequence[int]) -> Self:
        return cls(*fds)

    def out_of_the_way(self) -> Self:
        """Move all but the streams to high numbers; the low ones are closed.

        The kernel gives out the lowest free number. A script that closes what it does not know, as daemons do, and then opens
        files of its own would get the numbers that this process still writes to.
        """
        floor = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _HIGHEST) - _ROOM

        def moved(fd: int | None) -> int | None:
            if fd is None or fd >= floor:
                return fd
            try:
                high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)
            except OSError:  # none is free up there
                return fd
            os.close(fd)
            return high

        line, stacks, questions = (
            moved(self.line),
            moved(self.stacks),
            moved(self.questions),
        )
        assert line is not None
        assert stacks is not None
        assert questions is not None
        return replace(
            self,
            line=line,
            stacks=stacks,
            questions=questions,
            payload=moved(self.payload),
            result=moved(self.result),
        )


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
