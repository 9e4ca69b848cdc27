"""Names of hosts, without waiting for a name server that nobody asked to be asked.

c10d asks for the name of every address it connects to, only to print it in case of an error. Where no
server answers such questions (no reverse DNS, a lossy one), each connection costs 5 s and more
(pytorch#150532). So names are resolved here first, and while c10d connects, this thread has no name server.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import socket
import threading
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


@contextlib.contextmanager
def connecting_to(host: str) -> Iterator[None]:
    """Around c10d's connecting to ``host``: no name server is asked, unless that is a name and no address.

    What c10d would warn of, that it does not know the name of an address, nobody needs to know.
    """
    if not _is_address(host):
        yield  # outside of any handler: what is raised here has no context of ours
        return
    with without_name_servers(), _quiet:
        yield


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Quiet:
    """c10d's warnings are not printed in such blocks, of whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            level = _log_level()
            if not self._blocks and level is not None:
                self._before, level.value = level.value, max(level.value, _ERROR)
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            level = _log_level()
            if not self._blocks and level is not None:
                level.value = self._before


_quiet = _Quiet()
_ERROR = 2


def _log_level() -> ctypes.c_int | None:
    """What TORCH_CPP_LOG_LEVEL has set; None where torch is not loaded, or another one."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def numeric(host: str, port: int) -> str:
    """The first address of ``host``, as numbers; ``host`` itself if it has none."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return host
    return str(found[0][4][0])
