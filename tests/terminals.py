"""What appears on a terminal: the kernel delivers it later than it was written, and in pieces."""

from __future__ import annotations

import os
import select
import time


def read_until(terminal: int, end: bytes | None, patience: float = 120.0) -> bytes:
    """Read until the text ends with ``end``; if None, until nobody has the other end open."""
    shown = b""
    deadline = time.monotonic() + patience
    while end is None or not shown.endswith(end):
        left = deadline - time.monotonic()
        assert left > 0, f"after {patience:g} s: {shown[-2000:]!r}"
        if not select.select([terminal], [], [], left)[0]:
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:  # EIO: the last writer is gone
            return shown
        if not data:
            return shown
        shown += data
    return shown
