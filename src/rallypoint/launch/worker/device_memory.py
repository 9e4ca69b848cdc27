"""What torch's allocator holds on each device of a worker, in a few numbers."""

from __future__ import annotations

import sys
from typing import Any


def devices() -> list[dict[str, Any]]:
    """The allocator's numbers for each CUDA device that this process uses.

    Returns:
        ``device``, and in bytes ``allocated`` (tensors), ``most_allocated`` (so far), ``reserved`` (from the driver) in
        ``segments``, ``free`` (reserved, not allocated) and ``largest_free`` (in one piece). Empty if CUDA is not in use: nothing
        is initialised to find out.
    """
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    found: dict[int, dict[str, Any]] = {}
    for segment in cuda.memory_snapshot():
        number = int(segment["device"])
        each = found.setdefault(
            number,
            {
                "device": f"cuda:{number}",
                "allocated": 0,
                "most_allocated": int(cuda.max_memory_allocated(number)),
                "reserved": 0,
                "segments": 0,
                "free": 0,
                "largest_free": 0,
            },
        )
        each["segments"] += 1
        each["reserved"] += int(segment["total_size"])
        each["allocated"] += int(segment["allocated_size"])
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                each["free"] += int(block["size"])
                each["largest_free"] = max(each["largest_free"], int(block["size"]))
    return [found[number] for number in sorted(found)]
