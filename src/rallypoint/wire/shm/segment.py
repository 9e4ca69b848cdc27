"""Segments: nameless files in memory, sealed, and mapped by both ends."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from rallypoint.errors import ProtocolError


SMALLEST: Final = 64 * 1024
"""Capacity of the smallest segment. Smaller blocks are sent faster than shared."""

# Through ctypes and not mmap.mmap: that one keeps a descriptor open for each mapping, and a process that holds
# a thousand tensors would run into the usual limit of 1024; and it keeps the interpreter's lock while the kernel
# takes 16 ms to free 100 MB. Own handles: argument types set on shared ones would be set for everyone.
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
    """The capacity of the segment for a block of ``size`` bytes: four steps to each doubling, 64 KiB the least.

    So a segment is at most a quarter larger than its block (a doubling alone: twice), every one is whole pages,
    and the sizes that tensors often have (1, 5/4, 3/2 and 7/4 of a power of two) fit exactly.
    """
    if size <= SMALLEST:
        return SMALLEST
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


class File:
    """A descriptor that is closed when the last reference to this object goes.

    So no thread closes a number that another is about to send, and that may mean another file by then.
    """

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        at_end_of(self, os.close, fd)

    def fileno(self) -> int:
        """For ``socket.send_fds``; valid as long as this object is held."""
        return self._fd


@dataclass(slots=True, eq=False)
class Segment:
    """``view`` is that of the present lease; ``file`` is there until the peer has it.

    ``idle_since``: when the pool found it free, in monotonic seconds.

    ``is_home``: it has come back, and something here uses it. Written without a lock: by whoever takes it, then by
    the finalizer that lets it go.
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
    """Call ``act`` when the last reference to ``thing`` goes; not when Python ends: it may be in use until then."""
    end = weakref.finalize(thing, act, *args)
    end.atexit = False
    return end


def create(capacity: int) -> tuple[File, Memory]:
    """A new file in memory, sealed, and mapped here. It takes no memory until it is written to."""
    file = File(os.memfd_create("rallypoint", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(file.fileno(), capacity)
    # Who reads where a file has been cut off is killed by SIGBUS: neither end can do that to the other.
    fcntl.fcntl(
        file.fileno(),
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
    )
    return file, _map(file, capacity)


def map_received(file: File, capacity: int, what: str) -> Memory:
    try:
        seals = fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS)
        length = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ProtocolError(f"{what} came as a file that is not in memory: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(
            f"{what} came as a file that the sender could cut off: expected a sealed one"
        )
    if not 0 < capacity <= length:
        raise ProtocolError(f"{what} of {capacity} bytes came as a file of {length}")
    try:
        return _map(file, capacity)
    except OSError as error:
        raise ProtocolError(f"{what} of {capacity} bytes cannot be mapped: {error}") from error


def _map(file: File, capacity: int) -> Memory:
    """The file's bytes, mapped as long as the result or anything made from it (``from_buffer``) is referred to."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _mmap(None, capacity, access, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * capacity).from_address(address)
    at_end_of(memory, _munmap, address, capacity)
    return memory


def free_pages(segments: Iterable[Segment]) -> None:
    """Only of segments that nobody uses: what was in them reads as zeros, and takes new memory when read."""
    for each in segments:
        _madvise(ctypes.addressof(each.memory), each.capacity, mmap.MADV_REMOVE)
