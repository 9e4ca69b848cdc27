"""The cost of a session's checkpoints in one process: how long training stops for one, and how long writing and loading take.

python bench/checkpoints.py [--parameters 10000000] [--folder DIR] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from rallypoint import elastic
from rallypoint._core.storage import storage_at
from rallypoint.elastic.checkpointing.checkpoints import Checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="default: a new temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so that the CPU time of this thread is that of its copies
    width = round((arguments.parameters / 10) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(10)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, width)).sum().backward()
    optimizer.step()
    size = 3 * sum(each.numel() * each.element_size() for each in model.parameters())
    stops, writes = [], []
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)
        with elastic.session(model, optimizer, checkpoint=folder, checkpoint_every=1) as session:
            checkpoints = session._checkpoints  # noqa: SLF001
            assert isinstance(checkpoints, Checkpoints)
            for _ in range(arguments.rounds + 1):
                begun, used = time.perf_counter(), time.thread_time()
                with session.step():
                    pass
                stops.append((time.perf_counter() - begun, time.thread_time() - used))
                checkpoints._join(None)  # noqa: SLF001
                writes.append(time.perf_counter() - begun)
        storage = storage_at(folder)
        name = max(storage.names())
        begun = time.perf_counter()
        with elastic.session(model, optimizer, checkpoint=folder):
            loading = time.perf_counter() - begun
        held = [torch.empty_like(each).copy_(each) for each in model.parameters()]
        begun, used = time.perf_counter(), time.thread_time()
        with torch.no_grad():
            for into, each in zip(held, model.parameters(), strict=True):
                into.copy_(each)
        copying = 3 * (time.perf_counter() - begun), 3 * (time.thread_time() - used)
        plain = Path(made) / "plain"
        begun = time.perf_counter()
        with plain.open("wb") as file:
            file.write(os.urandom(1 << 20) * (size >> 20))
            file.flush()
            os.fsync(file.fileno())
        bare = time.perf_counter() - begun
    result = {
        "parameters": arguments.parameters,
        "megabytes": round(size / 1e6, 1),
        "checkpoint": name,
        # The first has nothing to copy; the second allocates the buffers and imports DCP.
        "first_stop_ms": round(stops[1][0] * 1000, 1),
        "stop_ms": round(statistics.median(wall for wall, _ in stops[2:]) * 1000, 1),
        "stop_cpu_ms": round(statistics.median(cpu for _, cpu in stops[2:]) * 1000, 1),
        "write_s": round(statistics.median(writes[2:]), 2),
        "load_s": round(loading, 2),
        "bare_copy_ms": round(copying[0] * 1000, 1),
        "bare_copy_cpu_ms": round(copying[1] * 1000, 1),
        "bare_write_and_sync_s": round(bare, 2),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
