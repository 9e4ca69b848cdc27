"""Merges the traces of several ranks: Chrome's trace format from torch's profiler, speedscope's from py-spy. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rallypoint._core.flight_records import Entered
from rallypoint._core.rank_words import in_words

from . import host_clocks


# In the merged trace, the process numbers of a rank start at the rank times this.
_ROOM: Final = 10_000
# Phases of events that are linked to others by an id.
_FLOWS: Final = frozenset("stfbneNOD")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What was recorded of one rank.

    Args:
        rank, pid, host: the worker's.
        body: the trace, as JSON.
        entered: when the rank entered its last collectives.
        clock: identifies the clock of its times; empty: the host's name does, even if another host has the same name.
    """

    rank: int
    pid: int
    host: str
    body: Mapping[str, Any]
    entered: Sequence[Entered] = field(default=())
    clock: str = ""

    @property
    def clock_of(self) -> str:
        return self.clock or self.host


def chrome(traces: Sequence[Trace]) -> tuple[dict[str, Any], list[str]]:
    """One trace of all ranks, for Perfetto and chrome://tracing.

    Args:
        traces: ordered by rank; not empty.
    Returns:
        The trace, and remarks about its times, in words.
    """
    first = traces[0]
    base = int(first.body.get("baseTimeNanoseconds") or 0)
    shifts, remarks = _shifts(traces)
    events: list[dict[str, Any]] = []
    for trace in traces:
        own = int(trace.body.get("baseTimeNanoseconds") or 0)
        shift = (own - base) / 1000 - shifts[trace.clock_of] * 1e6
        events += _events(trace, shift)
    kept = {
        key: value for key, value in first.body.items() if key not in {"traceEvents", "traceName"}
    }
    return {**kept, "traceEvents": events, "rallypoint": {"remarks": remarks}}, remarks


def _shifts(traces: Sequence[Trace]) -> tuple[dict[str, float], list[str]]:
    """By clock, the seconds to subtract from its times; and remarks about that."""
    by_clock: dict[str, list[Trace]] = {}
    for each in traces:
        by_clock.setdefault(each.clock_of, []).append(each)
    (clock, ours), *others = by_clock.items()
    shifts, remarks, here = {clock: 0.0}, [], ours[0].host
    for clock, theirs in others:
        host = theirs[0].host
        found = host_clocks.offset(
            [each.entered for each in ours], [each.entered for each in theirs]
        )
        if found is None:
            # Nothing relates the two clocks, so both traces start at the same point.
            shifts[clock] = (_begin(theirs) - _begin(ours)) / 1e6
            remarks.append(
                f"the times of {host} ({in_words([each.rank for each in theirs])}) cannot be compared with those of {here}:"
                " both begin at 0"
            )
        else:
            shifts[clock] = found.seconds
            remarks.append(
                f"the clock of {host} is aligned to that of {here} by {found.calls} collectives, to within"
                f" {found.within * 1000:.3g} ms"
            )
    return shifts, remarks


def _begin(traces: Sequence[Trace]) -> float:
    """When the first event of these traces began, in microseconds."""
    return min(
        (
            float(event["ts"]) + int(trace.body.get("baseTimeNanoseconds") or 0) / 1000
            for trace in traces
            for event in trace.body["traceEvents"]
            if event.get("ph") == "X"
        ),
        default=0.0,
    )


def _events(trace: Trace, shift: float) -> list[dict[str, Any]]:
    """A trace's events, with process and flow numbers unique to its rank, and shifted times."""
    numbers: dict[Any, int] = {}

    def number(pid: Any) -> int:
        return trace.rank * _ROOM + numbers.setdefault(pid, len(numbers))

    number(trace.pid)  # the process itself comes first
    found: list[dict[str, Any]] = []
    for event in trace.body["traceEvents"]:
        if event.get("ph") == "M" and event.get("name") in _OF_PROCESSES:
            continue
        changed = dict(event)
        if "pid" in changed:
            changed["pid"] = number(changed["pid"])
        if "ts" in changed:
            changed["ts"] = round(float(changed["ts"]) + shift, 3)
        if event.get("ph") in _FLOWS and "id" in event:
            changed["id"] = f"{trace.rank}.{event['id']}"
        found.append(changed)
    labels = {
        event.get("pid"): str(event["args"].get("labels", ""))
        for event in trace.body["traceEvents"]
        if event.get("ph") == "M" and event.get("name") == "process_labels"
    }
    where = f" on {trace.host}" if trace.host else ""
    for pid, place in numbers.items():
        name = f"rank {trace.rank} (pid {trace.pid}{where})"
        if pid != trace.pid:
            name = f"rank {trace.rank}: {labels.get(pid) or pid}"
        mine = trace.rank * _ROOM + place
        for key, args in (
            ("process_name", {"name": name}),
            ("process_sort_index", {"sort_index": mine}),
        ):
            found.append({"ph": "M", "name": key, "pid": mine, "tid": 0, "ts": 0, "args": args})
    return found


_OF_PROCESSES: Final = frozenset({"process_name", "process_labels", "process_sort_index"})


def speedscope(traces: Sequence[Trace]) -> dict[str, Any]:
    """One file of all ranks, for https://www.speedscope.app; threads are named by rank."""
    frames: list[Any] = []
    profiles: list[dict[str, Any]] = []
    for trace in traces:
        begin = len(frames)
        frames += trace.body["shared"]["frames"]
        for each in trace.body["profiles"]:
            changed = {**each, "name": f"rank {trace.rank}: {each.get('name', '')}"}
            if "samples" in each:
                changed["samples"] = [
                    [begin + frame for frame in stack] for stack in each["samples"]
                ]
            if "events" in each:
                changed["events"] = [
                    {**event, "frame": begin + event["frame"]} for event in each["events"]
                ]
            profiles.append(changed)
    schema = traces[0].body.get("$schema", "https://www.speedscope.app/file-format-schema.json")
    return {
        "$schema": schema,
        "shared": {"frames": frames},
        "profiles": profiles,
        "name": f"{in_words([each.rank for each in traces])}",
        "activeProfileIndex": 0,
        "exporter": "rally profile",
    }
