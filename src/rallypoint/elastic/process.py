"""What this process is to a job: a worker that can be kept, or not; at its first start, or in place of a lost one."""

from __future__ import annotations

import torch.distributed as dist

from rallypoint._core import env as environment, supervisor_line
from rallypoint.errors import RendezvousConnectionError

from .connections import Wiring
from .groups import Groups
from .link import Link, Notice
from .setup_record import Recorder, Replay


# Set by the supervisor for a worker that takes the place of a lost one.
TAKES_OVER = "RALLY_TAKES_OVER"


class KeptProcess:
    """The part of a worker that survives its peers.

    Args:
        host, port: of the workers' store.
        generation: of this process's start.
        takes_over: whether it takes the place of a lost one.
    """

    def __init__(self, host: str, port: int, generation: int, *, takes_over: bool) -> None:
        self.generation = generation
        self.takes_over = takes_over
        self.recorder = Recorder()
        self._records = Wiring(host, port, "rally/kept")
        self._forming: Wiring | None = None
        if takes_over:
            self.groups = Groups(None, Replay(self._read))
        else:
            self.groups = Groups(self.wiring_of(generation, host, port), None)
            self.groups.observer = self.recorder.observe
        self.groups.install()
        self.link = Link(self._cut)

    def wiring_of(self, generation: int, host: str, port: int) -> Wiring:
        """New connections for a generation."""
        return Wiring(host, port, f"rally/kept/{generation}", generation)

    def publish(self) -> None:
        """Store the record of this process's set-up, for those that may take its place."""
        for key, value in self.recorder.parts().items():
            self._records.set(key, value)
        for group in self.groups:
            group.observer = None
        self.groups.observer = None

    def form(self, notice: Notice) -> Wiring:
        """The connections to meet with, in the generation of a notice. A newer notice cuts them."""
        wiring = self.wiring_of(notice.generation, notice.host, notice.port)
        self._forming = wiring
        self.link.meet(notice.generation)
        newest = self.link.newest
        if newest is not None and newest.generation > notice.generation:
            wiring.cut()
        return wiring

    def _cut(self, notice: Notice) -> None:
        """In the link's thread: nobody may go on waiting for the lost ones. Newer connections may be under way already."""
        for wiring in {self.groups.wiring, self._forming}:
            if wiring is not None and wiring.generation < notice.generation:
                wiring.cut()

    def _read(self, key: str) -> bytes | None:
        try:
            return self._records.store().peek(f"rally/kept/{key}")
        except RendezvousConnectionError:
            return None


_process: KeptProcess | None = None


def begin() -> None:
    """Once, when this package is imported: in a worker of ``rally run``, groups that are made from now on can be kept."""
    global _process  # noqa: PLW0603  one process is one worker
    if _process is not None or supervisor_line.held() is None or dist.is_initialized():
        return
    variables = environment.snapshot()
    try:
        host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        generation = int(variables["RALLY_GENERATION"])
    except (KeyError, ValueError):
        return
    _process = KeptProcess(host, port, generation, takes_over=TAKES_OVER in variables)


def is_worker() -> bool:
    """Whether this process is a worker of ``rally run``."""
    return supervisor_line.held() is not None


def current() -> KeptProcess | None:
    """This process as a worker that can be kept; None in any other."""
    return _process if is_worker() else None
