"""``--metrics``: the metrics of a job, on a port or in a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import rallypoint
from rallypoint import events
from rallypoint._core import clock
from rallypoint.control import usage
from rallypoint.control.metrics import openmetrics
from rallypoint.control.metrics.metrics_server import MetricsServer
from rallypoint.errors import ConfigError
from rallypoint.launch.config import MetricsPlace
from rallypoint.launch.generation import Worker
from rallypoint.rendezvous import record_store

from .job_questions import collectives


# The same text is served for this many seconds, so that scrapers cannot keep the supervisor busy.
AGE = 1.0
# How many seconds GPUs may take to answer. The supervisor waits for them.
GPU_PATIENCE = 0.2
# How often a file is written.
FILE_INTERVAL = 10.0


class Metrics:
    """The metrics of a job. Called in the supervisor's loop.

    Args:
        place: where they are published.
        status: tells what the job does.
        workers: returns those of this node.
        slowness: by rank, how late a worker comes to collectives (:meth:`.SlowWatch.told`).
    Raises:
        ConfigError: the port is in use, or the file cannot be written.
    """

    def __init__(
        self,
        place: MetricsPlace,
        status: Callable[[], Mapping[str, Any]],
        workers: Callable[[], Iterable[Worker]],
        slowness: Callable[[], Mapping[int, Mapping[str, Any]]],
    ) -> None:
        self._status, self._workers, self._slowness = status, workers, slowness
        self._counts = openmetrics.Counts()
        self._text, self._at = "", float("-inf")
        self._path = None if place.path is None else Path(place.path)
        self.server: MetricsServer | None = None
        try:
            if self._path is None:
                self.server = MetricsServer(place.host, place.port, self._current)
            else:
                self._write(self._path)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError("--metrics", place.shown, why) from None
        self._subscription = events.subscribe(self._note)

    def write(self) -> None:
        """Write the file, if there is one. A full disk is no reason to end a job."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._write(self._path)

    def close(self) -> None:
        """Stop serving. A file stays, with the last state."""
        self._subscription.close()
        self.write()
        if self.server is not None:
            self.server.close()

    def _write(self, path: Path) -> None:
        self._at = float("-inf")  # write the current state
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            beside.write_text(self._current(), encoding="utf-8", errors="replace")
            beside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise

    def _current(self) -> str:
        now = clock.MONOTONIC.now()
        if now - self._at >= AGE:
            slowness = self._slowness()
            running = [each for each in self._workers() if each.pid and each.status is None]
            used = usage.of_workers((each.pid for each in running), GPU_PATIENCE)
            told = [
                {
                    "rank": each.ranks.rank,
                    "pid": each.pid,
                    "collectives": collectives(each),
                    "calls": each.calls(),
                    "slowness": slowness.get(each.ranks.rank),
                    **used[each.pid],
                }
                for each in running
            ]
            version = rallypoint.__version__
            self._counts.store_operations = record_store.operations()
            plain = self._path is not None
            self._text = openmetrics.text(self._status(), told, self._counts, version, plain=plain)
            self._at = clock.MONOTONIC.now()
        return self._text

    def _note(self, event: events.Event) -> None:
        match event:
            case events.WorkerEnded(stopped=False, error=error, signal=signal) if error:
                self._counts.note_end(signal=signal, error=error)
            case events.JobHangs():
                self._counts.hangs += 1
            case _:
                pass
