"""The metrics of real jobs: on a port and in a file."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from pace import pace
from rallypoint.control.metrics.metrics_server import MAX_CONNECTIONS
from supervisors import RALLY, Popen, run


pytestmark = pytest.mark.integration
PATIENCE = 30.0 * pace()
SCRIPT = """
import os, sys, time
import rallypoint
rank = int(os.environ["RANK"])
if os.environ["RALLY_GENERATION"] == "0":
    raise ValueError("at first")
rallypoint.progress(7 + rank, 10, loss=0.5)
print("stands", flush=True)
time.sleep(float(sys.argv[1]))
"""


def values(text: str, read: Any = text_string_to_metric_families) -> dict[tuple[str, str], float]:
    return {
        (each.name, each.labels.get("rank") or each.labels.get("kind", "")): each.value
        for family in read(text)
        for each in family.samples
    }


def test_on_a_port(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "--metrics", ":0", str(script), "1000"]
    job = Popen([RALLY, "run", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for line in job.stderr:
            if found := re.search(r"metrics are on port (\d+)", line):
                break
        url = f"http://127.0.0.1:{found[1]}"
        assert [job.stdout.readline() for _ in range(2)] == ["stands\n"] * 2
        # More silent connections than it keeps: it still answers.
        idle = [
            socket.create_connection(("127.0.0.1", int(found[1])))
            for _ in range(MAX_CONNECTIONS + 4)
        ]
        deadline = time.monotonic() + PATIENCE
        awaited = {("rally_worker_memory_bytes", "0"), ("rally_worker_cpu_seconds_total", "1")}
        while True:  # the text may be a second old, and use and steps are read at different times
            with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as answer:
                assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
                shown = values(answer.read().decode())
            if shown.get(("rally_worker_step", "1")) == 8 and awaited <= shown.keys():
                break
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert shown["rally_restarts_total", ""] == shown["rally_generation", ""] == 1
        assert shown["rally_worker_failures_total", "exception"] >= 1
        assert shown["rally_worker_memory_bytes", "0"] > 1 << 20
        assert shown["rally_worker_cpu_seconds_total", "1"] >= 0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/", timeout=PATIENCE)
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(f"{url}/metrics", data=b"x", timeout=PATIENCE)
        for each in idle:
            each.close()
        words = ["--metrics", f":{found[1]}", str(script), "0"]
        second = run([RALLY, "run", *words], capture_output=True, text=True)
        assert second.returncode == 2 and "--metrics" in second.stderr
    finally:
        job.terminate()
        job.communicate(timeout=PATIENCE)


def test_in_a_file(tmp_path: Path) -> None:
    script, path = tmp_path / "train.py", tmp_path / "job.prom"
    script.write_text(SCRIPT.replace("raise ValueError", "str"))
    words = ["--metrics", str(path), str(script), "0"]
    done = run([RALLY, "run", *words], capture_output=True, text=True)
    assert done.returncode == 0
    shown = values(path.read_text(), plain_families)  # as node_exporter reads it
    assert shown["rally_world_size", ""] == 1 and shown["rally_restarts_total", ""] == 0
    assert os.listdir(tmp_path) and not list(tmp_path.glob("job.prom.*"))


CALLS = """
import os, threading
from rallypoint import rpc
def answer(): return 42
def fail(): raise ValueError("no")
rank = int(os.environ["RANK"])
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
if rank == 0:
    for _ in range(50):
        rpc.rpc_sync("w1", answer)
    try:
        rpc.rpc_sync("w1", fail)
    except ValueError:
        pass
threading.Event().wait()
"""


def test_rpc_calls_are_counted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CALLS)
    words = ["--nproc-per-node", "2", "--metrics", ":0", str(script)]
    job = Popen([RALLY, "run", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for line in job.stderr:
            if found := re.search(r"metrics are on port (\d+)", line):
                break
        shown: dict[tuple[str, str], float] = {}
        deadline = time.monotonic() + PATIENCE
        # The package's own calls may be among them. Each rank reports its own, in its own time.
        told = ("rally_rpc_served_calls_total", "1"), ("rally_rpc_made_calls_total", "0")
        busy = ("rally_rpc_calls_in_progress", "0"), ("rally_rpc_queue_length", "1")
        while any(shown.get(each, 0) < 51 for each in told) or any(shown[each] for each in busy):
            assert time.monotonic() < deadline, shown
            time.sleep(0.2)
            text = urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics").read().decode()
            shown = values(text)
        assert shown["rally_rpc_failed_calls_total", "1"] == 1
        assert shown["rally_rpc_sent_bytes_total", "0"] > 51 * 8
        assert shown["rally_rpc_serving_seconds_bucket", "1"] >= 51  # the last one, up to +Inf
    finally:
        job.terminate()
        job.communicate(timeout=PATIENCE)
