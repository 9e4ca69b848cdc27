"""Host names, without c10d's reverse look-ups.

c10d looks up the name of every address it connects to, only to print it in errors. Without working reverse
DNS each connection takes 5 s or more (pytorch#150532). So names are resolved here first, and while c10d
connects, this thread uses no name server.
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

from . import addresses


class _ResolverState(ctypes.Structure):
    """The first fields of glibc's ``struct __res_state`` (resolv.h). Every thread has its own."""

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
    """Resolve names in this thread by ``/etc/hosts`` only, within a block. Works with glibc; otherwise has no effect."""
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
    """Wraps c10d's connecting to ``host``: if that is an address, no name server is asked.

    Also silences c10d's warning that it cannot find the address's name.
    """
    if not _is_address(host):
        yield  # outside any handler, so that errors raised here have no context of ours
        return
    with without_name_servers(), quiet:
        yield


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Quiet:
    """Silences c10d's warnings, in all threads, while any block is active."""

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


quiet = _Quiet()
_ERROR = 2


def _log_level() -> ctypes.c_int | None:
    """torch's C++ log level (TORCH_CPP_LOG_LEVEL); None if torch is not loaded or lacks the variable."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def numeric(host: str, port: int) -> str:
    """The first numeric address of ``host``; ``host`` itself if it has none."""
    try:
        found = socket.getaddrinfo(addresses.as_asked(host), port, type=socket.SOCK_STREAM)
    except OSError:
        return host
    return str(found[0][4][0])
