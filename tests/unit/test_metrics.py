"""Metrics: their text, read by the parser of Prometheus's own client, and the place that a command line names."""

from __future__ import annotations

import json
import mmap
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from rallypoint._core import call_counts, shared_page
from rallypoint.control.metrics import openmetrics
from rallypoint.control.metrics.openmetrics import Counts
from rallypoint.errors import ConfigError
from rallypoint.launch.config import MetricsPlace
from rallypoint.launch.watching.metrics import Metrics


def status(**more: Any) -> dict[str, Any]:
    progress = {
        "step": 1204,
        "total": 5000,
        "rate": 4.0,
        "seconds_ago": 0.1,
        "late": False,
        "seconds_left": 949.0,
        "metrics": {"loss": 0.5, 'a "b"\\\n': "nan"},
    }
    workers = [
        {"rank": 0, "local_rank": 0, "pid": 5, "state": "running", "progress": progress},
        {"rank": 1, "local_rank": 1, "pid": 0, "state": "starting", "progress": None},
    ]
    usual = {
        "id": "llm",
        "target": "train.py",
        "host": "h",
        "state": "running",
        "seconds": 12.5,
        "node_rank": 0,
        "nodes": 1,
        "world_size": 2,
        "generation": 1,
        "restarts": 1,
        "max_restarts": 3,
        "replaced": 0,
        "workers": workers,
    }
    return usual | more


def used(**more: Any) -> dict[str, Any]:
    usual = {"rank": 0, "pid": 5, "cpu": 2.0, "memory": 1 << 20, "threads": 3, "children": 0}
    unknown = dict.fromkeys(("collectives", "slowness", "calls", "gpu", "gpu_memory"))
    return {**usual, **unknown, **more}


def samples(text: str) -> dict[tuple[str, str], float]:
    """Samples by name and the labels that tell them apart."""
    found = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            own = {
                key: value
                for key, value in each.labels.items()
                if key in {"rank", "kind", "state", "name", "le"}
            }
            assert each.labels["run"] is not None
            key = each.name, ",".join(own.values())
            assert key not in found
            found[key] = each.value
    return found


def test_prometheus_reads_them() -> None:
    counts = Counts()
    counts.note_end(signal=9, error="was killed by SIGKILL")
    counts.note_end(signal=None, error="raised ValueError: x")
    text = openmetrics.text(status(), [used()], counts, "0.1.0")
    found = samples(text)
    assert found["rally_job_state", "running"] == 1
    assert found["rally_restarts_total", ""] == 1
    assert found["rally_worker_failures_total", "signal"] == 1
    assert found["rally_worker_failures_total", "exit_code"] == 0
    assert found["rally_workers", "running"] == found["rally_workers", "starting"] == 1
    assert found["rally_worker_step", "0"] == 1204
    assert found["rally_worker_step_duration_seconds", "0"] == 0.25
    assert found["rally_worker_metric", "0,loss"] == 0.5
    broken = found["rally_worker_metric", '0,a "b"\\\n']
    assert broken != broken
    assert found["rally_worker_memory_bytes", "0"] == 1 << 20
    assert ("rally_worker_collectives", "0") not in found
    assert not [name for name, _ in found if name.startswith(("rally_rpc", "rally_worker_gpu"))]


def test_node_exporter_reads_them_from_a_file() -> None:
    """Read by the parser of the older format, which has no info type and expects a counter's full name."""
    counts = Counts()
    counts.note_end(signal=9, error="was killed by SIGKILL")
    calls = dict.fromkeys(call_counts.NUMBERS, 3) | {"latencies": [2, 0, 1], "bounds": [1e-5, 0.5]}
    text = openmetrics.text(status(), [used(calls=calls)], counts, "0.1.0", plain=True)
    assert "# EOF" not in text and "# UNIT" not in text
    kinds = {line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert kinds == {"counter", "gauge", "histogram"}
    families = {each.name: each for each in plain_families(text)}
    assert families["rally_job_info"].type == "gauge"
    assert families["rally_restarts"].type == "counter"
    assert [each.name for each in families["rally_restarts"].samples] == ["rally_restarts_total"]
    serving = families["rally_rpc_serving_seconds"].samples
    assert [each.value for each in serving if each.name.endswith("_count")] == [3]
    assert [each.value for each in serving if each.labels.get("le") == "+Inf"] == [3]
    whole = samples(openmetrics.text(status(), [used(calls=calls)], counts, "0.1.0"))
    told = {each.name for family in families.values() for each in family.samples}
    assert {name for name, _ in whole} <= told, "nothing is missing"


def test_gpus() -> None:
    text = openmetrics.text(status(), [used(gpu=90.0, gpu_memory=1 << 30)], Counts(), "0.1.0")
    found = samples(text)
    assert found["rally_worker_gpu_busy_ratio", "0"] == 0.9
    assert found["rally_worker_gpu_memory_bytes", "0"] == 1 << 30


def test_rpc_calls() -> None:
    calls = dict.fromkeys(call_counts.NUMBERS, 3) | {"latencies": [2, 0, 1], "bounds": [1e-5, 0.5]}
    found = samples(openmetrics.text(status(), [used(calls=calls)], Counts(), "0.1.0"))
    assert found["rally_rpc_made_calls_total", "0"] == 3
    assert found["rally_rpc_queue_length", "0"] == 3
    assert found["rally_rpc_sent_bytes_total", "0"] == 3
    buckets = [value for (name, _), value in found.items() if name.endswith("seconds_bucket")]
    assert buckets == [2, 2, 3]


COUNTS = dict.fromkeys(call_counts.NUMBERS, 1) | {"latencies": [0, 1], "bounds": [0.5]}


def test_what_a_worker_counts_of_its_calls_is_read() -> None:
    fd = os.memfd_create(call_counts.NAME)
    try:
        os.ftruncate(fd, shared_page.SIZE)
        assert call_counts.read(fd) is None
        with mmap.mmap(fd, shared_page.SIZE) as memory:
            call_counts.write(memory, COUNTS)
        assert call_counts.read(fd) == COUNTS
        assert shared_page.is_page(fd, call_counts.NAME)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"\xff",
        *(
            json.dumps(COUNTS | changed).encode()
            for changed in (
                *({"made": "3"}, {"made": -1}, {"made": None}, {"queue": True}),
                *({"latencies": [1]}, {"latencies": ["1", 1]}, {"bounds": 3}),
                {"latencies": [0] * 100, "bounds": [0.5] * 99},
            )
        ),
    ],
)
def test_what_else_a_script_writes_there_is_nothing(content: bytes) -> None:
    fd = os.memfd_create(call_counts.NAME)
    try:
        os.ftruncate(fd, shared_page.SIZE)
        with mmap.mmap(fd, shared_page.SIZE) as memory:
            shared_page.write(memory, content)
        assert call_counts.read(fd) is None
    finally:
        os.close(fd)


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    file = Path(__file__).parents[2] / "contrib" / "grafana" / "rallypoint.json"
    asked = [
        target["expr"]
        for panel in json.loads(file.read_text())["panels"]
        for target in panel["targets"]
    ]
    names = {name for expr in asked for name in re.findall(r"rally_\w+", expr)}
    slowness = {"late": 0.3, "waits": 0.0, "slow": True}
    worker = used(calls=COUNTS, slowness=slowness, gpu=90.0, gpu_memory=1 << 30)
    known = samples(openmetrics.text(status(), [worker], Counts(), "0"))
    assert names and names <= {name for name, _ in known}


@given(st.text(), st.text(), st.none() | st.integers(0, 5))
def test_names_of_users_break_nothing(run: str, target: str, generation: int | None) -> None:
    told = status(id=run, target=target, generation=generation, node_rank=None)
    assert samples(openmetrics.text(told, [], Counts(), "0"))["rally_nodes", ""] == 1


def test_cpu_time_never_falls_but_begins_anew_with_another_process() -> None:
    counts = Counts()
    shown = [
        samples(openmetrics.text(status(), [used(**each)], counts, "0"))[
            "rally_worker_cpu_seconds_total", "0"
        ]
        for each in ({"cpu": 5.0}, {"cpu": 3.0}, {"cpu": 6.0}, {"cpu": 0.1, "pid": 6})
    ]
    assert shown == [5.0, 5.0, 6.0, 0.1]


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        (":9400", "127.0.0.1", 9400, None),
        ("*:9400", "", 9400, None),
        ("[::1]:0", "::1", 0, None),
        ("10.0.0.3:80", "10.0.0.3", 80, None),
        ("./a:80", "", 0, "./a:80"),
        ("job.prom", "", 0, "job.prom"),
    ],
)
def test_places(text: str, host: str, port: int, path: str | None) -> None:
    assert MetricsPlace.parse(text, "--metrics") == MetricsPlace(
        shown=text, host=host, port=port, path=path
    )


@pytest.mark.parametrize("text", ["9400", ":x", ":99999", "host:"])
def test_no_places(text: str) -> None:
    with pytest.raises(ConfigError, match="--metrics"):
        MetricsPlace.parse(text, "--metrics")


def test_a_file_that_cannot_be_written_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "job.prom").mkdir()
    place = MetricsPlace.parse(str(tmp_path / "job.prom"), "--metrics")
    with pytest.raises(ConfigError, match="Is a directory"):
        Metrics(place, status, tuple, dict)
    assert [each.name for each in tmp_path.iterdir()] == ["job.prom"]
