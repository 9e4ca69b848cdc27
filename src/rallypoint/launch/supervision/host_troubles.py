"""What has happened to hosts of the job, for ``--avoid-hosts``."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from rallypoint._core.clock import Deadline
from rallypoint.errors import RallyError
from rallypoint.launch.avoidance import avoid_file, trouble
from rallypoint.launch.avoidance.trouble import Kind, Trouble
from rallypoint.launch.output.failure import WorkerFailure


# How long the end of the job waits for the file.
_PATIENCE = 5.0


class HostTroubles:
    """Notes troubles and writes them to the list, in a thread because a network file system may hang.

    Args:
        path: the list's path; None: there is no list.
        say: prints a line for the user.

    Attributes:
        noted: everything so far.
    """

    def __init__(self, path: str | None, say: Callable[[str], None]) -> None:
        self._path = None if path is None else Path(path)
        self._say = say
        self.noted: list[Trouble] = []
        self._due: queue.SimpleQueue[Trouble | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._problem = ""

    def note_loss(self, host: str, incident: str, why: str) -> None:
        """A host is lost, whichever node says so. A host without a name is not noted."""
        if host:
            self._note(Trouble(host=host, kind=Kind.LOST, incident=incident, why=why))

    def note_failure(self, failure: WorkerFailure, incident: str) -> None:
        """A worker of this node has failed, perhaps for a reason that is the host's."""
        found = trouble.of_failure(failure, incident)
        if found is not None:
            self._note(found)

    def note_broken(self, host: str, incident: str, why: str) -> None:
        """This node cannot continue."""
        self._note(Trouble(host=host, kind=Kind.FAILED, incident=incident, why=why))

    def _note(self, found: Trouble) -> None:
        if any((each.host, each.incident) == (found.host, found.incident) for each in self.noted):
            return
        self.noted.append(found)
        if self._path is None:
            return
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="rally-hosts", daemon=True)
            try:
                self._writer.start()
            except RuntimeError:  # no thread is left
                self._writer = None
                self._problem = "no thread is left"
                return
        self._due.put(found)

    def _write(self) -> None:
        assert self._path is not None
        while (found := self._due.get()) is not None:
            try:
                avoid_file.add(self._path, [found])
            except (OSError, RallyError) as error:
                self._problem = str(error)

    def close(self) -> None:
        """Wait, for a limited time, until everything is written."""
        if self._writer is not None:
            self._due.put(None)
            self._writer.join(Deadline(_PATIENCE).remaining())
            if self._writer.is_alive():
                self._problem = f"nothing was written within {_PATIENCE:g} s"
        if self._problem:
            hosts = ", ".join(dict.fromkeys(each.host for each in self.noted))
            self._say(f"--avoid-hosts {self._path}: {hosts} not noted: {self._problem}")
            self._problem = ""
