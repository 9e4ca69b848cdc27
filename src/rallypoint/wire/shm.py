"""Large blocks of bytes for another process on this host, in memory that both map.

Theory of operation
-------------------
What is dear about a large tensor is not its bytes but its pages: a copy into memory that was never touched
runs at a tenth of the speed of one into memory that was. So memory is kept, and used again, newest first.

A **segment** is a nameless file in memory (``memfd``) that both ends map. It has no name in any file system, so
nothing is left over however the processes end; it does not count against ``/dev/shm``. Its descriptor travels
once, with the first message about it; then neither end keeps one open. A segment holds one **block** at a time.

Each connection has its own segments: what was ever mapped by one peer never carries another's data. What the
pools of a process share is only a ``Budget``.

Giving a block back takes no message. Beside the segments there is one **control page** per connection, a byte
for each segment, and the segment's number is the place of its byte:

    ============  ==================================================  ==============================
    byte          meaning                                             written by
    ============  ==================================================  ==============================
    0             free                                                receiver, when nothing uses it
    1             on its way: the message may not have been read yet  sender, in ``Pool.lease``
    2             gone: free, and its memory was given back           sender, in ``Pool.trim``
    3             held: something in the receiver uses the memory     receiver, in ``Mapped.view``
    ============  ==================================================  ==============================

The sender looks at the page when it wants a block. A receiver that writes nonsense there harms what it receives
itself and nothing else: the page says when memory is free, never where it is.

Giving memory back takes no message either: the sender frees the pages of an idle file (``MADV_REMOVE``), however
many still map it; the receiver drops its mapping when it next hears of a new segment. The number of a segment
that is gone is used again, the lowest first, and another file is sent under it.

Pages are touched by whoever copies, not beforehand (``MAP_POPULATE``): populating costs what it saves, and a copy
by several threads touches pages in several.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from rallypoint.errors import ConfigError, ProtocolError


if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc only from Python 3.12 on


MAX_SEGMENTS: Final = 4096
"""Of one connection: the bytes of its control page."""

SMALLEST: Final = 64 * 1024
"""Capacity of the smallest segment. Smaller blocks are sent faster than shared."""

_FREE: Final = 0
_SENT: Final = 1  # the lowest bit of a byte alone tells whether it is in use
_GONE: Final = 2
_HELD: Final = 3
# Below this, asking for the addresses costs more than the interpreter's lock is worth.
_COPY_UNLOCKED: Final = 256 * 1024

# Through ctypes and not mmap.mmap: that one keeps a descriptor open for each mapping, and a process that holds
# a thousand tensors would run into the usual limit of 1024; and it keeps the interpreter's lock while the kernel
# takes 16 ms to free 100 MB. Own handles: argument types set on shared ones would be set for everyone.
_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None)
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


class _View(ctypes.Structure):
    """Python's own Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = _python.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_View), ctypes.c_int]
_release_buffer = _python.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_View)]
_release_buffer.restype = None

_Memory = ctypes.Array[ctypes.c_ubyte]

# Of a receiver that has closed: it is read only.
_NO_PAGE: Final = memoryview(bytes(MAX_SEGMENTS))


def available() -> bool:
    """Whether this system has nameless, sealable files in memory: Linux."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_SEAL_SHRINK")


def capacity_for(size: int) -> int:
    """The capacity of the segment for a block of ``size`` bytes: four steps to each doubling, 64 KiB the least.

    So a segment is at most a quarter larger than its block (a doubling alone: twice), every one is whole pages,
    and the sizes that tensors often have (1, 5/4, 3/2 and 7/4 of a power of two) fit exactly.
    """
    if size <= SMALLEST:
        return SMALLEST
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


Move = Callable[[int, int, int], object]


def copy_into(view: memoryview, source: Buffer, move: Move = ctypes.memmove) -> None:
    """Copy all of ``source`` into ``view``, without the interpreter's lock if it is large.

    Args:
        move: copies from an address to another so many bytes, if there are many.

    Raises:
        ValueError: they differ in size.
        BufferError: ``source`` is not contiguous.
    """
    size = memoryview(source).nbytes
    if view.nbytes != size:
        raise ValueError(f"cannot copy {size} bytes into a view of {view.nbytes}")
    if size < _COPY_UNLOCKED:
        view[:] = memoryview(source).cast("B")
        return
    target, origin = _View(), _View()
    _get_buffer(view, target, 1)  # PyBUF_WRITABLE
    try:
        _get_buffer(source, origin, 0)  # PyBUF_SIMPLE: contiguous, or BufferError
        try:
            move(target.buf, origin.buf, size)
        finally:
            _release_buffer(origin)
    finally:
        _release_buffer(target)


class File:
    """A descriptor that is closed when the last reference to this object goes.

    So no thread closes a number that another is about to send, and that may mean another file by then.
    """

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _at_end_of(self, os.close, fd)

    def fileno(self) -> int:
        """For ``socket.send_fds``; valid as long as this object is held."""
        return self._fd


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Memory that was leased for one message. Drop it once that is sent: the memory is the receiver's then.

    Args:
        segment: the number that the receiver knows it by.
        size: bytes, as asked for.
        capacity: bytes of the segment.
        view: writable, exactly ``size`` bytes.
        file: goes with the message, as ``segment`` and ``capacity`` do; None: the peer has it already.
    """

    segment: int
    size: int
    capacity: int
    view: memoryview
    file: File | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one end of a connection, at one moment.

    Args:
        segments: how many there are.
        leased: how many of them are on their way or held by the receiver.
        bytes: capacity of all.
        idle_bytes: capacity of those that are not leased.
    """

    segments: int
    leased: int
    bytes: int
    idle_bytes: int


@dataclass(slots=True, eq=False)
class _Segment:
    """``view`` is that of the present lease; ``file`` is there until the peer has it."""

    number: int
    capacity: int
    memory: _Memory
    file: File | None
    view: memoryview | None = None
    freed: int = 0


class Budget:
    """How much memory all pools of a process may take together. Thread-safe.

    Args:
        limit_bytes: capacity of all segments, leased and idle.

    Raises:
        ConfigError: that is negative.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise ConfigError("limit_bytes", limit_bytes, "expected a number of bytes, 0 for none")
        self.limit_bytes = limit_bytes
        # What follows is for the pools, which hold the lock. They compute under it; files are made and memory is
        # given back outside.
        self.lock = threading.Lock()
        self.used = 0
        self.pools: set[Pool] = set()
        self.freed = (
            0  # counts blocks that came back: the smaller its number, the longer one is idle
        )

    def reserve(self, capacity: int) -> list[_Segment] | None:
        """Count ``capacity`` in; returns whose memory has to be given back for it. None: that would not do."""
        missing = self.used + capacity - self.limit_bytes
        gone: list[_Segment] = []
        if missing > 0:
            for pool in self.pools:
                pool.collect()
            idle = [(each, pool) for pool in self.pools for each in pool.idle_segments()]
            if sum(each.capacity for each, _ in idle) < missing:
                return None
            for each, pool in sorted(idle, key=lambda pair: pair[0].freed):
                if missing <= 0:
                    break
                pool.forget(each)
                gone.append(each)
                missing -= each.capacity
        self.used += capacity
        return gone


class Pool:
    """The sender's end of a connection: leases memory for messages to its one peer. Thread-safe.

    No call of it belongs into a finalizer: that may run in the thread that holds the lock.
    """

    def __init__(self, budget: Budget, control: _Memory) -> None:
        self._budget = budget
        self._page = memoryview(control).cast("B")
        self._process = os.getpid()
        self._closed = False
        self._segments: dict[int, _Segment] = {}
        self._idle: dict[int, list[_Segment]] = {}  # by capacity; the one freed last is last
        self._leased = (
            0  # one bit for each, at its byte's lowest: comparing with the page is one operation
        )
        self._gaps: list[int] = []  # a heap: numbers below _top that no segment has
        self._top = 0

    @classmethod
    def open(cls, budget: Budget) -> tuple[Self, File]:
        """A pool without memory yet, and its control page, which goes to the peer before anything else.

        Raises:
            OSError: the system gives no file or memory.
        """
        file, control = _create(MAX_SEGMENTS)
        pool = cls(budget, control)
        with budget.lock:
            budget.pools.add(pool)
        return pool, file

    def lease(self, size: int) -> Block | None:
        """Memory for ``size`` bytes. Its content is undefined.

        Returns:
            None if the budget is spent (even after idle memory of every pool was given back), the system gives
            none, or the pool is closed: the bytes go another way then.

        Raises:
            ValueError: ``size`` is not positive.
        """
        if size <= 0:
            raise ValueError(f"cannot lease {size} bytes: expected at least 1")
        if os.getpid() != self._process:
            return None  # after a fork the memory, and the peer, are still the parent's
        capacity = capacity_for(size)
        with self._budget.lock:
            if self._closed:
                return None
            self.collect()
            warm = self._pop_idle(capacity)
            if warm is not None:
                return self._lend(warm, size)
            number, gone = self._take_number()
            if number is None:
                return None
            room = self._budget.reserve(capacity)
            if room is None:
                heapq.heappush(self._gaps, number)
        _free_pages(gone + (room or []))
        if room is None:
            return None
        try:
            created = _create(capacity)
        except OSError:
            created = None
        with self._budget.lock:
            if created is None or self._closed:
                self._budget.used -= capacity
                heapq.heappush(self._gaps, number)
                return None
            file, memory = created
            segment = self._segments[number] = _Segment(number, capacity, memory, file)
            return self._lend(segment, size)

    def told(self, block: Block) -> None:
        """The peer has been sent the block's ``file``: it is not needed again."""
        with self._budget.lock:
            segment = self._segments.get(block.segment)
            if segment is not None and segment.file is block.file:
                segment.file = None

    def take_back(self, block: Block) -> None:
        """A leased block whose message will not be sent. Not for one that was: the receiver frees that."""
        with self._budget.lock:
            segment = self._segments.get(block.segment)
            if segment is not None and segment.view is block.view:  # not lent anew meanwhile
                self._page[block.segment] = _FREE
                self.collect()

    def trim(self, keep_bytes: int = 0) -> int:
        """Give idle memory back to the system, what was idle longest first, until at most ``keep_bytes`` is idle.

        Returns:
            the bytes given back.
        """
        if os.getpid() != self._process:
            return 0
        gone: list[_Segment] = []
        with self._budget.lock:
            self.collect()
            idle = sorted(self.idle_segments(), key=lambda each: each.freed)
            left = sum(each.capacity for each in idle)
            for each in idle:
                if left <= keep_bytes:
                    break
                self.forget(each)
                gone.append(each)
                left -= each.capacity
        _free_pages(gone)
        return sum(each.capacity for each in gone)

    def close(self) -> None:
        """The connection has ended. Idempotent.

        A peer that is cut off may be alive and read what it holds: that memory is not touched and not used again,
        and the system has it back when the peer drops it, or ends.
        """
        if os.getpid() != self._process:
            return
        with self._budget.lock:
            if self._closed:
                return
            self.collect()
            idle = self.idle_segments()
            for each in list(self._segments.values()):
                self.forget(each)
            self._leased = 0
            self._page = memoryview(b"")
            self._closed = True
            self._budget.pools.discard(self)
        _free_pages(idle)

    def statistics(self) -> Statistics:
        """How things stand now."""
        with self._budget.lock:
            self.collect()
            idle = self.idle_segments()
            return Statistics(
                segments=len(self._segments),
                leased=len(self._segments) - len(idle),
                bytes=sum(each.capacity for each in self._segments.values()),
                idle_bytes=sum(each.capacity for each in idle),
            )

    # The rest is called with the budget's lock held.

    def collect(self) -> None:
        """Find the blocks that are free by now."""
        if not self._leased:
            return
        freed = self._leased & ~int.from_bytes(self._page[: self._top], "little")
        if not freed:
            return
        self._leased ^= freed
        marks = freed.to_bytes(self._top, "little")
        number = marks.find(1)
        while number >= 0:
            segment = self._segments[number]
            segment.view = None
            segment.freed = self._budget.freed
            self._budget.freed += 1
            self._idle.setdefault(segment.capacity, []).append(segment)
            number = marks.find(1, number + 1)

    def idle_segments(self) -> list[_Segment]:
        """Those that are not leased."""
        return [each for alike in self._idle.values() for each in alike]

    def forget(self, segment: _Segment) -> None:
        """It is no part of the pool any more; whoever calls this frees its pages, if it was idle."""
        alike = self._idle.get(segment.capacity, [])
        if segment in alike:
            alike.remove(segment)
            self._page[segment.number] = _GONE
        del self._segments[segment.number]
        self._budget.used -= segment.capacity
        heapq.heappush(self._gaps, segment.number)

    def _pop_idle(self, capacity: int) -> _Segment | None:
        """Of this capacity, or of less than twice it: warm memory that is too large beats fresh memory that fits."""
        suitable = capacity
        while suitable < 2 * capacity:
            if self._idle.get(suitable):
                return self._idle[suitable].pop()
            suitable = capacity_for(suitable + 1)
        return None

    def _take_number(self) -> tuple[int | None, list[_Segment]]:
        """The lowest that is free, and the idle segment that had to go for it, if one had."""
        gone: list[_Segment] = []
        if not self._gaps and self._top == MAX_SEGMENTS:
            gone = sorted(self.idle_segments(), key=lambda each: each.freed)[:1]
            for each in gone:
                self.forget(each)
        if self._gaps:
            return heapq.heappop(self._gaps), gone
        if self._top == MAX_SEGMENTS:
            return None, gone
        self._top += 1
        return self._top - 1, gone

    def _lend(self, segment: _Segment, size: int) -> Block:
        view = memoryview(segment.memory).cast("B")[:size]
        segment.view = view
        self._leased |= 1 << (8 * segment.number)
        self._page[segment.number] = _SENT
        return Block(segment.number, size, segment.capacity, view, segment.file)


class Mapped:
    """The receiver's end of a connection: finds the blocks that the peer's messages name. Thread-safe.

    After a fork the child may read what the parent holds, as long as the parent holds it.
    """

    def __init__(self, control: _Memory, limit_bytes: int | None = None) -> None:
        self._page = memoryview(control).cast("B")
        self._limit_bytes = limit_bytes
        self._segments: dict[int, _Memory] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, control_fd: int, limit_bytes: int | None = None) -> Self:
        """The end that belongs to the peer's pool. Takes the descriptor over, and closes it.

        Args:
            control_fd: as received.
            limit_bytes: the most that the peer may have mapped here: its budget, where that is known.

        Raises:
            ProtocolError: the file is not a control page.
        """
        return cls(_map_received(File(control_fd), MAX_SEGMENTS, "the control page"), limit_bytes)

    def add(self, segment: int, fd: int, capacity: int) -> None:
        """The peer announces a segment. Takes the descriptor over, and closes it, whatever happens.

        Raises:
            ProtocolError: the number, the capacity or the file is none that a pool would send.
        """
        received = File(fd)
        if segment not in range(MAX_SEGMENTS):
            raise ProtocolError(
                f"segment {segment!r} was announced: expected a number from 0 to {MAX_SEGMENTS - 1}"
            )
        if self._page[segment] == _HELD:
            raise ProtocolError(f"segment {segment} was announced anew while its memory is in use")
        with self._lock:
            for each in [n for n in self._segments if n == segment or self._page[n] == _GONE]:
                del self._segments[each]
            mapped = sum(map(len, self._segments.values()))
            if self._limit_bytes is not None and mapped + capacity > self._limit_bytes:
                raise ProtocolError(
                    f"segment {segment} of {capacity} bytes was announced beside {mapped} bytes:"
                    f" expected at most {self._limit_bytes} altogether"
                )
            self._segments[segment] = _map_received(received, capacity, f"segment {segment}")

    def view(self, segment: int, size: int) -> memoryview:
        """The block that a message names: writable, ``size`` bytes, and the caller's own.

        It is given back when the last reference goes: to the view, a slice of it, or a tensor made over it
        (``torch.frombuffer``). That may be in any thread, and after ``close``. Do not ``release()`` it: a tensor
        over it would not notice.

        Raises:
            ProtocolError: no such block is on its way.
        """
        with self._lock:
            memory = self._segments.get(segment)
            if memory is None:
                raise ProtocolError(f"a block came in segment {segment!r}, which was not announced")
            if not 0 < size <= len(memory):
                raise ProtocolError(
                    f"a block of {size} bytes came in segment {segment}: expected 1 to {len(memory)}"
                )
            self._expect_sent(segment)
            block = type(memory).from_buffer(memory)  # keeps the memory mapped
            _at_end_of(block, _free_block, self._page, segment, os.getpid())
            self._page[segment] = _HELD
        return memoryview(block).cast("B")[:size]

    def discard(self, segment: int) -> None:
        """The message that names this block is not wanted: the peer has the memory back without a view of it.

        Raises:
            ProtocolError: no such block is on its way.
        """
        if segment not in range(MAX_SEGMENTS):
            raise ProtocolError(
                f"a block came in segment {segment!r}: expected a number from 0 to {MAX_SEGMENTS - 1}"
            )
        with self._lock:
            self._expect_sent(segment)
            self._page[segment] = _FREE

    def close(self) -> None:
        """Unmap what no view uses, now; the rest when its view goes. No further block is taken. Idempotent."""
        with self._lock:
            self._segments = {}
            # Whoever still has this object shall not keep memory mapped by it: a page that names no block.
            self._page = _NO_PAGE

    def statistics(self) -> Statistics:
        """How things stand now. Segments that the peer has given back count until it announces another."""
        with self._lock:
            used = [n for n in self._segments if self._page[n] & 1]
            mapped = sum(map(len, self._segments.values()))
            return Statistics(
                segments=len(self._segments),
                leased=len(used),
                bytes=mapped,
                idle_bytes=mapped - sum(len(self._segments[n]) for n in used),
            )

    def _expect_sent(self, segment: int) -> None:
        """Under the lock."""
        state = self._page[segment]
        if state != _SENT:
            raise ProtocolError(
                f"a block came in segment {segment}, but none is on its way there (its state is {state})"
            )


def _free_block(page: memoryview, segment: int, process: int) -> None:
    """A finalizer, so it takes no lock. A fork's copy of a view is not what the sender waits for."""
    if os.getpid() == process:
        page[segment] = _FREE


def _at_end_of(thing: object, act: Callable[..., object], *args: object) -> None:
    """Call ``act`` when the last reference to ``thing`` goes; not when Python ends: it may be in use until then."""
    weakref.finalize(thing, act, *args).atexit = False


def _create(capacity: int) -> tuple[File, _Memory]:
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


def _map_received(file: File, capacity: int, what: str) -> _Memory:
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


def _map(file: File, capacity: int) -> _Memory:
    """The file's bytes, mapped as long as the result or anything made from it (``from_buffer``) is referred to."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _mmap(None, capacity, access, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * capacity).from_address(address)
    _at_end_of(memory, _munmap, address, capacity)
    return memory


def _free_pages(segments: Iterable[_Segment]) -> None:
    """Only of segments that nobody uses: what was in them reads as zeros, and takes new memory when read."""
    for each in segments:
        _madvise(ctypes.addressof(each.memory), each.capacity, mmap.MADV_REMOVE)
