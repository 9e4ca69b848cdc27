"""Ports for servers that a test starts later."""

from __future__ import annotations

import random
import socket


# Below the range that the kernel assigns to connections: nobody takes one before it is bound.
FIRST, LAST = 20_000, 32_000


def free_port() -> int:
    """A port on which nobody listens, on any interface."""
    while True:
        port = random.randrange(FIRST, LAST)
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
