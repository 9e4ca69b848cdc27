"""What traces cost: an empty rpc call with `rally run --traces otlp` and without it; prints JSON.

    python bench/tracing.py --quick
    python bench/tracing.py --output bench/results/tracing.json

Two workers on this host call each other; a collector in this process reads their spans. Jobs with and without traces alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jobs import RALLY, Progress, machine, publish, ratio, spread


def nothing() -> None:
    """The function that is called."""


def work(calls: int, output: Path) -> None:
    """A worker. Rank 0 writes the median time of a call, in microseconds."""
    from rallypoint import rpc

    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        times = []
        for _ in range(calls + calls // 5):
            began = time.perf_counter()
            rpc.rpc_sync("worker1", nothing)
            times.append(time.perf_counter() - began)
        output.write_text(str(1e6 * statistics.median(times[calls // 5 :])))
    rpc.shutdown()


class Collector(BaseHTTPRequestHandler):
    """Reads spans, and discards them."""

    def do_POST(self) -> None:
        """Read what is sent."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def measure(jobs: int, calls: int) -> list[dict[str, Any]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
    }
    flags: dict[str, list[str]] = {"no traces": [], "traces": ["--traces", "otlp"]}
    times: dict[str, list[float]] = {name: [] for name in flags}
    progress = Progress(jobs * len(flags))
    with tempfile.TemporaryDirectory() as base:
        output = Path(base, "median")
        for _ in range(jobs):
            for name, words in flags.items():
                progress.step(name)
                command = [*RALLY, "--nproc-per-node", "2", *words, __file__]
                subprocess.run([*command, "--worker", str(calls), str(output)], env=env, check=True)
                times[name].append(float(output.read_text()))
    progress.close()
    server.shutdown()
    figures = {name: spread(found, 1) for name, found in times.items()}
    plain = figures["no traces"]
    return [
        {
            "what": "empty call",
            "with": name,
            "unit": "us",
            **figure,
            "over_plain": ratio(figure, plain),
        }
        for name, figure in figures.items()
    ]


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a quick check")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    given = parser.parse_args()
    rows = measure(1, 200) if given.quick else measure(7, 5000)
    return publish({**machine(), "rows": rows}, given.output)


if __name__ == "__main__":
    sys.exit(main())
