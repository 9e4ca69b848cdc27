"""Names of hosts, without waiting for a name server that nobody asked to be asked.

c10d asks for the name of every address it connects to, only to print it in case of an error. Where no
server answers such questions (no reverse DNS, a lossy one), each connection costs 5 s and more
(pytorch#150532). So names are resolved here first, and while c10d connects, this thread has no name server.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
from collections.abc import Iterator
from typing import Any


class _ResolverState(ctypes.Structure):
    """The head of glibc's ``struct __res_state`` (resolv.h), which every thread has one of."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    )


@functools.cache
def _functions() -> tuple[Any, Any] | None:
    """glibc's ``res_init`` and ``__res_state``; None with another C library."""
    try:
        libc = ctypes.CDLL(None)
        init, state = libc["__res_init"], libc["__res_state"]
    except (OSError, AttributeError):
        return None
    state.restype = ctypes.POINTER(_ResolverState)
    return init, state


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """In this thread, until the end of the block, only ``/etc/hosts`` is asked; where that can be arranged."""
    functions = _functions()
    if functions is None:
        yield
        return
    init, state = functions
    init()
    held = state().contents
    servers = held.nscount
    held.nscount = 0
    try:
        yield
    finally:
        held.nscount = servers


def numeric(host: str, port: int) -> str:
    """The first address of ``host``, as numbers; ``host`` itself if it has none."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return host
    return str(found[0][4][0])
