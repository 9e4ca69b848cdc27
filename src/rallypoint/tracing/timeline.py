"""Which spans a job's events make. Pure.

The spans of a supervisor, indented below their parents:

- ``job``: from its start to its end.

  - ``rendezvous``: until the nodes have agreed on a round; again after a loss or a restart.
  - ``generation``: from the start of its workers until all have ended.

    - ``worker``: a process.
    - ``recovery``: a session's, from the loss of a worker until all workers of this node are back.

Losses, hangs, slow ranks and signals are recorded as events of the span in which they occur.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rallypoint import events


JOB = "job"
RENDEZVOUS = "rendezvous"
GENERATION = "generation"

# Events recorded on a span. All others start or end spans, or are left out.
_NOTES = (
    *(events.NodeLost, events.StoreLost, events.NodeReported),
    *(events.JobHangs, events.WorkerSlow, events.SignalReceived),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """A span begins.

    Args:
        key: identifies the span when it ends.
        name: the span's name.
        parent: the key of its parent; None: it has none.
        seconds_ago: how many seconds ago it began.
        attributes: the span's attributes.
    """

    key: str
    name: str
    parent: str | None = None
    seconds_ago: float = 0.0
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """A span ends.

    Args:
        key: the span's key.
        error: what went wrong; empty if nothing did.
        attributes: what is known only now.
    """

    key: str
    error: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something happens within a span.

    Args:
        key: the span's key.
        name: the name of what happens.
        attributes: its attributes.
    """

    key: str
    name: str
    attributes: Mapping[str, Any]


Step = Begin | End | Note


class Timeline:
    """The open spans of one process."""

    def __init__(self) -> None:
        self._open: dict[
            str, str | None
        ] = {}  # each with its parent; parents before their children

    @property
    def innermost(self) -> str | None:
        """The span below which the workers' activity belongs."""
        return next((key for key in (GENERATION, JOB) if key in self._open), None)

    def take(self, event: events.Event) -> list[Step]:
        """The steps that an event causes. The event has just happened."""
        return list(self._steps(event))

    def close(self) -> list[Step]:
        """The process is exiting: end all open spans."""
        return list(self._end_below(None))

    def _steps(self, event: events.Event) -> Iterator[Step]:
        match event:
            case events.JobStarted():
                yield from self.close()
                yield self._begin(JOB, None, _attributes(event))
                yield self._begin(RENDEZVOUS, JOB)
            case events.RoundFormed():
                if RENDEZVOUS not in self._open:
                    yield self._begin(RENDEZVOUS, self.innermost, seconds_ago=event.seconds)
                yield self._end(RENDEZVOUS, attributes=_attributes(event))
            case events.GenerationStarted():
                yield from self._end_if_open(RENDEZVOUS)
                yield from self._end_if_open(GENERATION)
                name = f"{GENERATION} {event.generation}"
                yield self._begin(GENERATION, self._parent(JOB), _attributes(event), name=name)
            case events.WorkerStarted():
                key, parent = f"worker {event.worker_pid}", self._parent(GENERATION)
                yield from self._end_if_open(key)
                yield self._begin(key, parent, _attributes(event), name=f"rank {event.rank}")
            case events.WorkerEnded():
                if (key := f"worker {event.worker_pid}") in self._open:
                    error = "" if event.stopped else event.error
                    yield self._end(key, error, _attributes(event))
            case events.WorkerReplaced():
                key, parent = f"recovery {event.replaced}", self._parent(GENERATION)
                yield from self._end_if_open(key)
                yield self._begin(key, parent, _attributes(event), name="recovery")
            case events.SessionRecovered():
                # A recovery also ends those of earlier losses.
                for key in [each for each in self._open if each.startswith("recovery ")]:
                    if int(key.partition(" ")[2]) <= event.replaced:
                        yield self._end(key, attributes=_attributes(event))
            case events.GenerationEnded():
                error = f"ranks {event.failed_ranks} have failed" if event.failed_ranks else ""
                yield from self._end_if_open(GENERATION, error, _attributes(event))
                if event.aim == "restart":
                    yield from self._meet_again()
            case events.JobEnded():
                error = (event.cause or event.aim) if event.aim == "fail" else ""
                yield from self._end_if_open(JOB, error, _attributes(event))
            case _ if isinstance(event, _NOTES):
                yield from self._note(event)
            case _:
                pass

    def _note(self, event: events.Event) -> Iterator[Step]:
        if (key := self.innermost) is not None:
            yield Note(key=key, name=event.kind, attributes=_attributes(event))
        if isinstance(event, events.NodeLost):
            yield from self._meet_again()

    def _meet_again(self) -> Iterator[Step]:
        if JOB in self._open and RENDEZVOUS not in self._open:
            yield self._begin(RENDEZVOUS, JOB)

    def _parent(self, key: str) -> str | None:
        return key if key in self._open else self.innermost

    def _begin(
        self,
        key: str,
        parent: str | None,
        attributes: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        seconds_ago: float = 0.0,
    ) -> Begin:
        self._open[key] = parent
        return Begin(
            key=key,
            name=name or key,
            parent=parent,
            seconds_ago=seconds_ago,
            attributes=attributes or {},
        )

    def _end(self, key: str, error: str = "", attributes: Mapping[str, Any] | None = None) -> End:
        del self._open[key]
        return End(key=key, error=error, attributes=attributes or {})

    def _end_if_open(
        self, key: str, error: str = "", attributes: Mapping[str, Any] | None = None
    ) -> Iterator[End]:
        """End a span, after the spans below it."""
        if key in self._open:
            yield from self._end_below(key)
            yield self._end(key, error, attributes)

    def _end_below(self, key: str | None) -> Iterator[End]:
        """End the spans below the given one, children first; None: all spans."""
        below = {key}
        for each, parent in list(self._open.items()):
            if parent in below or key is None:
                below.add(each)
        for each in reversed([each for each in self._open if each in below and each != key]):
            yield self._end(each)


def _attributes(event: events.Event) -> dict[str, Any]:
    """The event's fields under our prefix, except empty ones: an OpenTelemetry attribute cannot be None."""
    found = {f"rally.{name}": value for name, value in event.fields().items()}
    return {name: value for name, value in found.items() if value is not None and value != ""}
