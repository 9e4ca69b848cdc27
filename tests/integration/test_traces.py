"""A job as spans: what a collector gets."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import supervisors
from rallypoint.tracing import exporters


class Span:
    """A span as a collector reads it."""

    def __init__(self, found: Any, resource: dict[str, Any]) -> None:
        self.name = found.name
        self.id, self.parent, self.trace = found.span_id, found.parent_span_id, found.trace_id
        self.kind = {1: "internal", 2: "server", 3: "client"}[found.kind]
        self.error = found.status.message if found.status.code == 2 else ""
        self.attributes = {each.key: _value(each.value) for each in found.attributes}
        self.events = [each.name for each in found.events]
        self.seconds = (found.end_time_unix_nano - found.start_time_unix_nano) / 1e9
        self.resource = resource


def _value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in any_value.array_value.values]
    return getattr(any_value, kind)


class Collector:
    """An OTLP collector over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                outer.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for each in request.resource_spans:
            resource = {one.key: _value(one.value) for one in each.resource.attributes}
            for scope in each.scope_spans:
                self.spans += [Span(span, resource) for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def one(self, name: str, kind: str = "internal") -> Span:
        (found,) = self.all(name, kind)
        return found

    def all(self, name: str, kind: str = "internal") -> list[Span]:
        return [span for span in self.spans if (span.name, span.kind) == (name, kind)]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def run(*words: str, script: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2", *words]
    return supervisors.run(
        [*command, str(script)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


FAILS_ONCE = """
import os
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("bad batch 7")
"""


def test_a_job_that_restarts_is_one_trace(collector: Collector, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ONCE)
    done = run(
        *("--traces", "otlp", "--max-restarts", "1", "--rdzv-id", "llm"),
        script=script,
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
    )
    assert done.returncode == 0, done.stderr
    job, first, second = map(collector.one, ("job", "generation 0", "generation 1"))
    assert job.attributes["rally.run_id"] == job.resource["rally.run_id"] == "llm"
    assert job.resource["service.name"] == "rallypoint"
    assert not job.parent
    assert first.parent == second.parent == job.id
    assert first.error
    assert not second.error
    workers = [span for span in collector.spans if span.name.startswith("rank ")]
    assert sorted(span.name for span in workers if span.parent == first.id) == ["rank 0", "rank 1"]
    assert [span.name for span in workers if span.error] == ["rank 1"]
    assert {span.trace for span in collector.spans} == {job.trace}
    assert all(each.parent == job.id for each in collector.all("rendezvous"))
    assert job.seconds >= first.seconds + second.seconds


def test_it_belongs_to_the_trace_of_who_started_it(collector: Collector, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print('below', os.environ['TRACEPARENT'])")
    trace, span = "0123456789abcdef" * 2, "fedcba9876543210"
    done = run(
        script=script,
        RALLY_TRACES="otlp",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_SERVICE_NAME="mine",
        TRACEPARENT=f"00-{trace}-{span}-01",
    )
    assert done.returncode == 0, done.stderr
    job, generation = map(collector.one, ("job", "generation 0"))
    assert (job.trace.hex(), job.parent.hex()) == (trace, span)
    assert job.resource["service.name"] == "mine"
    assert f"below 00-{trace}-{generation.id.hex()}-01" in done.stdout


CALLS = """
import asyncio, os
import torch
from rallypoint import rpc

rank = int(os.environ["RANK"])

def double(x): return 2 * x
def outer(x): return rpc.rpc_sync("w0", double, (x,))
async def slowly(x):
    await asyncio.sleep(0.01)
    return rpc.rpc_async("w0", double, (x,)).wait()
def fails(): raise ValueError("no good")
class Frozen(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)
def freezes(): raise Frozen("cold")
async def freezes_slowly(): raise Frozen("cold")
def items(n):
    for i in range(n):
        yield outer(i)
async def async_items(n):
    for i in range(n):
        yield i
@rpc.functions.async_execution
def later(x): return rpc.rpc_async("w0", double, (x,))

rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
if rank == 0:
    assert rpc.rpc_sync("w1", double, (torch.ones(3),)).sum() == 6
    assert rpc.rpc_sync("w1", outer, (3,)) == 6
    assert rpc.rpc_sync("w1", slowly, (3,)) == 6
    assert rpc.rpc_async("w1", later, (3,)).wait() == 6
    assert list(rpc.rpc_stream("w1", items, (2,))) == [0, 2]
    assert next(iter(rpc.rpc_stream("w1", items, (9,)))) == 0
    assert list(rpc.rpc_stream("w1", async_items, (2,))) == [0, 1]
    assert rpc.remote("w1", double, (4,)).to_here() == 8
    for function, error in ((fails, ValueError), (freezes, Frozen), (freezes_slowly, Frozen)):
        try:
            rpc.rpc_sync("w1", function)
        except error:
            pass
rpc.shutdown()
"""


def test_a_call_is_a_span_on_both_sides(collector: Collector, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CALLS)
    done = run("--traces", "otlp", script=script, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    assert done.returncode == 0, done.stderr
    assert "def fails" in done.stderr, "the traceback does not show the function"
    generation = collector.one("generation 0")
    ids = {span.id: span for span in collector.spans}
    assert {span.trace for span in collector.spans} == {generation.trace}
    for served in (span for span in collector.spans if span.kind == "server"):
        made = ids[served.parent]
        assert (made.name, made.kind) == (served.name, "client")
        assert {made.attributes["rally.peer"], served.attributes["rally.peer"]} == {"w0", "w1"}
        assert made.attributes["rpc.method"] == served.name
    for name in ("outer", "slowly", "later", "fails", "items", "async_items"):
        for made in collector.all(f"__main__.{name}", "client"):
            assert made.parent == generation.id
            below = [span for span in collector.spans if span.parent == made.id]
            assert [span.name for span in below] == [made.name], "served once"
    inner = [
        ids[ids[span.parent].parent].name for span in collector.all("__main__.double", "server")
    ]
    # Not those called directly, whose parent's parent is the generation.
    callers = [name.removeprefix("__main__.") for name in inner if name.startswith("__main__.")]
    assert set(callers) == {"outer", "slowly", "later", "items"}
    for side in ("client", "server"):
        failed = collector.one("__main__.fails", side)
        assert failed.error == "no good"
        assert failed.attributes["error.type"] == "ValueError"
    assert collector.one("__main__.slowly", "server").seconds >= 0.01
    assert collector.one("RRef.to_here", "client").parent == generation.id
    failed_calls = {"__main__.fails", "__main__.freezes", "__main__.freezes_slowly"}
    assert {span.name for span in collector.spans if span.error} == failed_calls


def test_a_collector_that_is_down_fails_no_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CALLS)
    done = run("--traces", "otlp", script=script, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1" in done.stderr


def test_the_end_of_a_process_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "LAST_SECONDS", 0.1)
    answers = threading.Event()

    class Provider:
        def shutdown(self) -> None:
            answers.wait()

    exporters.shut_down(Provider())  # type: ignore[arg-type]
    assert not answers.is_set()
    answers.set()


OWN_PROVIDER = """
import os
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rallypoint import rpc, tracing

kept = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
if os.environ.get("ENABLE"):
    tracing.enable(provider)
rank = int(os.environ["RANK"])
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
with trace.get_tracer("mine").start_as_current_span("step") as step:
    rpc.rpc_sync(f"w{1 - rank}", int)
rpc.shutdown()
spans = kept.get_finished_spans()
(made,) = [each for each in spans if each.kind is trace.SpanKind.CLIENT]
assert made.parent.span_id == step.get_span_context().span_id
assert [each.name for each in spans if each.kind is trace.SpanKind.SERVER] == ["builtins.int"]
"""


@pytest.mark.parametrize(
    "env", [{"RALLY_TRACES": "console"}, {"ENABLE": "1"}], ids=["flag", "call"]
)
def test_a_provider_of_the_script_is_used(tmp_path: Path, env: dict[str, str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN_PROVIDER)
    done = run(script=script, **env)
    assert done.returncode == 0, done.stderr


def test_only_one_side_traces(collector: Collector, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        'import os\nif os.environ["RANK"] == "1": del os.environ["RALLY_TRACES"]\n' + CALLS
    )
    done = run("--traces", "otlp", script=script, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    assert done.returncode == 0, done.stderr
    assert collector.one("__main__.outer", "client")
    assert not collector.all("__main__.outer", "server")


def test_an_exporter_that_is_not_there_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    done = run("--traces", "otpl", script=script)
    assert done.returncode == 2
    assert "--traces 'otpl': expected an exporter of OpenTelemetry: console, otlp" in done.stderr
