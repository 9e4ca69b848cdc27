"""A job's metrics as OpenMetrics text, for Prometheus and compatible readers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
Labels = Mapping[str, str | int]


@dataclass(slots=True)
class Counts:
    """What has happened to a job on this node since it started.

    Args:
        failures: how many workers have failed, by kind.
        hangs: how often the job was reported to hang.
        store_operations: how many operations on the store this node's supervisor has made.
    """

    failures: dict[str, int] = field(
        default_factory=lambda: {"exception": 0, "exit_code": 0, "signal": 0}
    )
    hangs: int = 0
    store_operations: int = 0
    _cpu: dict[tuple[int, int], float] = field(default_factory=dict)

    def note_end(self, *, signal: int | None, error: str) -> None:
        """A worker has failed on its own.

        Args:
            signal: the signal that ended it, or None.
            error: how it failed, in words.
        """
        kind = "exit_code"
        if signal is not None:
            kind = "signal"
        elif error.startswith("raised "):
            kind = "exception"
        self.failures[kind] += 1

    def rising(self, workers: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], float]:
        """CPU seconds by rank and pid. They never fall, even if a child's seconds vanish when it ends."""
        known = self._cpu
        self._cpu = {}
        for each in workers:
            key = each["rank"], each["pid"]
            self._cpu[key] = max(each["cpu"], known.get(key, 0.0))
        return self._cpu


class _Text:
    """The lines of metric families. All samples of a family are adjacent."""

    def __init__(self, usual: Labels, *, plain: bool) -> None:
        self.lines: list[str] = []
        self._usual = usual
        self._plain = plain

    def family(
        self,
        name: str,
        kind: Literal["gauge", "counter", "histogram", "info"],
        help_text: str,
        samples: Iterable[tuple[Labels, float]],
        unit: str = "",
    ) -> None:
        samples = list(samples)
        if not samples:
            return
        endings = {"counter": "total", "histogram": "bucket", "info": "info"}
        suffix = f"_{endings[kind]}" if kind in endings else ""
        if self._plain:
            # In the older format a counter's name includes its suffix, and there are no "info" metrics and no units.
            whole = name if kind == "histogram" else f"{name}{suffix}"
            self.lines.append(f"# HELP {whole} {help_text}")
            self.lines.append(f"# TYPE {whole} {'gauge' if kind == 'info' else kind}")
        else:
            self.lines.append(f"# TYPE {name} {kind}")
            if unit:
                self.lines.append(f"# UNIT {name} {unit}")
            self.lines.append(f"# HELP {name} {help_text}")
        self._add(f"{name}{suffix}", samples)
        if self._plain and kind == "histogram":
            ends = [(labels, value) for labels, value in samples if labels["le"] == "+Inf"]
            without = [({k: v for k, v in labels.items() if k != "le"}, n) for labels, n in ends]
            unknown = [(labels, float("nan")) for labels, _ in without]
            for ending, values in (("count", without), ("sum", unknown)):
                self._add(f"{name}_{ending}", values)

    def _add(self, name: str, samples: Iterable[tuple[Labels, float]]) -> None:
        for labels, value in samples:
            told = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items())
            usual = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in self._usual.items())
            both = ",".join(filter(None, (usual, told)))
            self.lines.append(f"{name}{{{both}}} {_number(value)}")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    text = str(value)
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)


def text(
    status: Mapping[str, Any],
    usage: Iterable[Mapping[str, Any]],
    counts: Counts,
    version: str,
    *,
    plain: bool = False,
) -> str:
    """The metrics of a job on one node.

    Args:
        status: the supervisor's status.
        usage: what each worker of this node uses.
        counts: what has happened since the job started.
        version: this package's version.
        plain: in Prometheus' older text format (0.0.4), the only one that node_exporter reads from files.
    """
    workers = list(usage)
    none: Labels = {}
    node = "" if status["node_rank"] is None else status["node_rank"]
    out = _Text({"run": str(status["id"]), "node": node}, plain=plain)
    told = {"target": str(status["target"]), "host": str(status["host"]), "version": version}
    out.family("rally_job", "info", "The job, and this node of it.", [(told, 1)])
    state = [({"state": str(status["state"])}, 1.0)]
    out.family("rally_job_state", "gauge", "1 for the job's present state.", state)
    seconds = float(status["seconds"])
    out.family(
        "rally_job_age_seconds",
        "gauge",
        "Time since the supervisor started.",
        [(none, seconds)],
        "seconds",
    )
    for name, help_text, value in (
        ("rally_nodes", "Nodes in the round.", status["nodes"]),
        ("rally_world_size", "Workers in the round.", status["world_size"]),
        ("rally_generation", "0 at first, plus one after each restart.", status["generation"]),
        ("rally_max_restarts", "Restarts allowed.", status["max_restarts"]),
    ):
        out.family(name, "gauge", help_text, [] if value is None else [(none, value)])
    for name, help_text, value in (
        ("rally_restarts", "Restarts of all workers.", status["restarts"]),
        ("rally_replaced_workers", "Workers replaced in sessions.", status["replaced"]),
        ("rally_store_operations", "Operations on the job's store.", counts.store_operations),
        ("rally_hangs", "Hangs that node 0 has reported.", counts.hangs),
    ):
        out.family(name, "counter", help_text, [(none, value)])
    failures = [({"kind": kind}, count) for kind, count in counts.failures.items()]
    help_text = "Workers of this node that failed on their own."
    out.family("rally_worker_failures", "counter", help_text, failures)
    states = dict.fromkeys(("starting", "running", "hung", "ended"), 0)
    for each in status["workers"]:
        states[each["state"]] = states.get(each["state"], 0) + 1
    counted = [({"state": state}, count) for state, count in states.items()]
    out.family("rally_workers", "gauge", "Workers of this node.", counted)
    _add_usage(out, workers, counts)
    _add_calls(out, workers)
    _add_slowness(out, workers)
    _add_progress(out, status["workers"])
    return "\n".join([*out.lines, *([] if plain else ["# EOF"]), ""])


def _add_usage(out: _Text, workers: list[Mapping[str, Any]], counts: Counts) -> None:
    rising = counts.rising(workers)
    cpu = [({"rank": rank}, round(seconds, 3)) for (rank, _), seconds in rising.items()]
    name = "rally_worker_cpu_seconds"
    out.family(name, "counter", "CPU time, with children.", cpu, "seconds")
    for key, name, unit, help_text in (
        ("memory", "rally_worker_memory_bytes", "bytes", "Resident memory, with children."),
        ("gpu_memory", "rally_worker_gpu_memory_bytes", "bytes", "Memory on GPUs, with children."),
        ("threads", "rally_worker_threads", "", "Threads, with those of children."),
        ("children", "rally_worker_children", "", "Child processes."),
        (
            "collectives",
            "rally_worker_collectives",
            "",
            "Collectives started since the last recovery.",
        ),
    ):
        samples = [({"rank": each["rank"]}, each[key]) for each in workers if each[key] is not None]
        out.family(name, "gauge", help_text, samples, unit)
    busy = [
        ({"rank": each["rank"]}, each["gpu"] / 100) for each in workers if each["gpu"] is not None
    ]
    help_text = "Share of the time in which its busiest GPU ran a kernel of any process."
    out.family("rally_worker_gpu_busy_ratio", "gauge", help_text, busy)


def _add_calls(out: _Text, workers: Iterable[Mapping[str, Any]]) -> None:
    found = [(each["rank"], each["calls"]) for each in workers if each.get("calls") is not None]

    def values(key: str) -> list[tuple[Labels, float]]:
        return [({"rank": rank}, each[key]) for rank, each in found]

    for key, name, unit, help_text in (
        ("made", "rally_rpc_made_calls", "", "Calls and messages to other workers."),
        ("served", "rally_rpc_served_calls", "", "Answered calls of other workers."),
        ("failed", "rally_rpc_failed_calls", "", "Answered calls that raised."),
        (
            "bytes_sent",
            "rally_rpc_sent_bytes",
            "bytes",
            "Bytes sent over connections, without shared memory.",
        ),
        (
            "bytes_received",
            "rally_rpc_received_bytes",
            "bytes",
            "Bytes received over connections, without shared memory.",
        ),
    ):
        out.family(name, "counter", help_text, values(key), unit)
    for key, name, help_text in (
        ("in_progress", "rally_rpc_calls_in_progress", "Calls made and not answered yet."),
        ("being_served", "rally_rpc_calls_being_served", "Calls of other workers."),
        ("queue", "rally_rpc_queue_length", "Calls of other workers waiting for a thread."),
    ):
        out.family(name, "gauge", help_text, values(key))
    buckets: list[tuple[Labels, float]] = []
    for rank, each in found:
        total = 0
        for bound, count in zip([*each["bounds"], float("inf")], each["latencies"], strict=True):
            total += count
            buckets.append(({"rank": rank, "le": _number(float(bound))}, total))
    name = "rally_rpc_serving_seconds"
    out.family(name, "histogram", "Time from a call's arrival to its answer.", buckets, "seconds")


def _add_slowness(out: _Text, workers: Iterable[Mapping[str, Any]]) -> None:
    found = [(each["rank"], each["slowness"]) for each in workers if each["slowness"] is not None]
    for key, name, help_text in (
        ("late", "rally_worker_late_ratio", "Share of a step that the others wait for it."),
        ("waits", "rally_worker_wait_ratio", "Share of a step that it waits for others."),
        ("slow", "rally_worker_slow", "1 if it has kept the others waiting for long."),
    ):
        values = [({"rank": rank}, float(each[key])) for rank, each in found]
        out.family(name, "gauge", help_text, values)


def _add_progress(out: _Text, workers: Iterable[Mapping[str, Any]]) -> None:
    found = [(each["rank"], each["progress"]) for each in workers if each["progress"] is not None]
    for key, name, unit, help_text in (
        ("step", "rally_worker_step", "", "Step, as counted by the script."),
        ("total", "rally_worker_total_steps", "", "Total steps, as given by the script."),
        ("seconds_ago", "rally_worker_step_age_seconds", "seconds", "Time since the last step."),
    ):
        values = [({"rank": rank}, each[key]) for rank, each in found if each[key] is not None]
        out.family(name, "gauge", help_text, values, unit)
    durations = [({"rank": rank}, 1 / each["rate"]) for rank, each in found if each["rate"]]
    name = "rally_worker_step_duration_seconds"
    out.family(name, "gauge", "Average duration of recent steps.", durations, "seconds")
    metrics = [
        ({"rank": rank, "name": name}, float(value))
        for rank, each in found
        for name, value in each["metrics"].items()
    ]
    out.family(
        "rally_worker_metric", "gauge", "Metrics that the script reports with its steps.", metrics
    )
