"""A worker's counts of its rpc calls, in memory that its supervisor reads: for metrics."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from typing import Any

from . import shared_page


# The name of the page.
NAME = "rally-calls"
# A worker's numbers; bytes are those that went over connections, not shared memory. Calls in progress and in the queue
# are current values; the others only grow.
NUMBERS = (
    *("made", "served", "failed", "in_progress", "being_served", "queue"),
    *("bytes_sent", "bytes_received"),
)
# Served calls by the time from arrival to answer, and the bounds of the buckets in seconds; the last one has none.
LATENCIES, BOUNDS = "latencies", "bounds"
MAX_BUCKETS = 64


def write(memory: mmap.mmap, found: Mapping[str, Any]) -> None:
    """Write a worker's counts.

    Args:
        memory: the page.
        found: :data:`NUMBERS`, and the histogram.
    """
    content = json.dumps(found).encode()
    if len(content) <= shared_page.ROOM:
        shared_page.write(memory, content)


def read(fd: int) -> dict[str, Any] | None:
    """What a worker has written; None if it has written nothing, or what is there cannot be read now or is something else."""
    content = shared_page.read(fd)
    try:
        found = json.loads(content) if content else None
    except ValueError:
        return None
    if not isinstance(found, dict) or not all(_is_number(found.get(each)) for each in NUMBERS):
        return None
    counts, bounds = found.get(LATENCIES), found.get(BOUNDS)
    if not isinstance(counts, list) or not isinstance(bounds, list):
        return None
    if len(counts) != len(bounds) + 1 or len(counts) > MAX_BUCKETS:
        return None
    return found if all(_is_number(each) for each in (*counts, *bounds)) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
