"""Segments: sealed anonymous files in memory, mapped by both ends."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from rallypoint._core import linux
from rallypoint.errors import ProtocolError


SMALLEST: Final = 64 * 1024
"""Capacity of the smallest segment. Smaller blocks are sent faster than shared."""

# With ctypes instead of mmap.mmap, which keeps a descriptor open for each mapping, so that a thousand tensors reach the
# usual limit of 1024, and which holds the GIL while the kernel takes 16 ms to free 100 MB. A CDLL of its own: argument
# types set on a shared one would apply to all its users.
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

Memory = ctypes.Array[ctypes.c_ubyte]


def capacity_for(size: int) -> int:
    """The capacity of the segment for a block of ``size`` bytes: four steps per doubling, at least 64 KiB.

    So a segment consists of whole pages, is at most a quarter larger than its block, and common sizes of tensors (1, 5/4,
    3/2 and 7/4 of a power of two) fit exactly.
    """
    if size <= SMALLEST:
        return SMALLEST
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


class File:
    """A descriptor that is closed when the last reference to this object is gone.

    So no thread can close it while another one is about to send it.
    """

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        at_end_of(self, os.close, fd)

    def fileno(self) -> int:
        """The descriptor; valid while this object is referred to."""
        return self._fd


@dataclass(slots=True, eq=False)
class Segment:
    """A segment of a pool.

    Args:
        file: until the peer has it.
        view: of the present lease.
        idle_since: when the pool found it free, in monotonic seconds.
        is_home: it was returned by the peer, and something here uses it. Set when it is taken, and cleared by the
            finalizer that releases it; neither takes a lock.
    """

    number: int
    capacity: int
    memory: Memory
    file: File | None
    view: memoryview | None = None
    freed: int = 0
    idle_since: float = 0.0
    is_home: bool = False


def at_end_of(
    thing: object, act: Callable[..., object], *args: object
) -> weakref.finalize[..., Any]:
    """Call ``act`` when the last reference to ``thing`` is gone, but not at exit, when it may still be in use."""
    end = weakref.finalize(thing, act, *args)
    end.atexit = False
    return end


def create(capacity: int) -> tuple[File, Memory]:
    """Create, seal and map a file in memory. It takes no memory until it is written to."""
    file = File(linux.memfd_create("rallypoint", linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING))
    os.ftruncate(file.fileno(), capacity)
    # Reading a truncated file raises SIGBUS. The seals keep each end from doing that to the other.
    fcntl.fcntl(
        file.fileno(),
        linux.F_ADD_SEALS,
        linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL,
    )
    return file, _map(file, capacity)


def map_received(file: File, capacity: int, what: str) -> Memory:
    try:
        seals = fcntl.fcntl(file.fileno(), linux.F_GET_SEALS)
        length = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ProtocolError(f"received {what} as a file that is not in memory: {error}") from error
    if not seals & linux.F_SEAL_SHRINK:
        raise ProtocolError(f"received {what} as a file that is not sealed against truncation")
    if not 0 < capacity <= length:
        raise ProtocolError(f"received {what} of {capacity} bytes as a file of {length}")
    try:
        return _map(file, capacity)
    except OSError as error:
        raise ProtocolError(f"cannot map {what} of {capacity} bytes: {error}") from error


def _map(file: File, capacity: int) -> Memory:
    """The file's bytes, mapped while there are references to the result or anything made from it (``from_buffer``)."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _mmap(None, capacity, access, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * capacity).from_address(address)
    at_end_of(memory, _munmap, address, capacity)
    return memory


def free_pages(segments: Iterable[Segment]) -> None:
    """Free the pages of unused segments. They then read as zeros, and reading takes new memory."""
    for each in segments:
        _madvise(ctypes.addressof(each.memory), each.capacity, mmap.MADV_REMOVE)
