"""The receiver's end: the blocks in the peer's messages."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from typing import Any, Final, NamedTuple, Self

from rallypoint.errors import ProtocolError

from .control import FREE, GONE, HELD, HOME, MAX_SEGMENTS, SENT, Statistics
from .segment import File, Memory, at_end_of, map_received


# The page of a closed receiver; read-only.
_NO_PAGE: Final = memoryview(bytes(MAX_SEGMENTS))


class Mapped:
    """The receiver's end of a connection: finds the blocks in the peer's messages. Thread-safe.

    After a fork, the child may read the parent's blocks as long as the parent holds them.
    """

    def __init__(self, control: Memory, limit_bytes: int | None = None) -> None:
        self._page = memoryview(control).cast("B")
        self._limit_bytes = limit_bytes
        self._segments: dict[int, Memory] = {}
        # Views in use, by the address of their memory.
        self._lent: dict[int, _Lent] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, control_fd: int, limit_bytes: int | None = None) -> Self:
        """The end for the peer's pool.

        Args:
            control_fd: as received; closed here.
            limit_bytes: the most that the peer may have mapped here: its budget, if known.

        Raises:
            ProtocolError: the file is not a control page.
        """
        return cls(map_received(File(control_fd), MAX_SEGMENTS, "the control page"), limit_bytes)

    def add(self, segment: int, fd: int, capacity: int) -> None:
        """Map a segment that the peer announces. Closes the descriptor in any case.

        Raises:
            ProtocolError: number, capacity or file is invalid.
        """
        received = File(fd)
        if segment not in range(MAX_SEGMENTS):
            raise ProtocolError(
                f"received segment {segment!r}: expected a number from 0 to {MAX_SEGMENTS - 1}"
            )
        if self._page[segment] == HELD:
            raise ProtocolError(f"received segment {segment} again while its memory is in use")
        with self._lock:
            for each in [n for n in self._segments if n == segment or self._page[n] == GONE]:
                del self._segments[each]
            mapped = sum(map(len, self._segments.values()))
            if self._limit_bytes is not None and mapped + capacity > self._limit_bytes:
                raise ProtocolError(
                    f"received segment {segment} of {capacity} bytes in addition to {mapped} bytes:"
                    f" expected at most {self._limit_bytes} in total"
                )
            self._segments[segment] = map_received(received, capacity, f"segment {segment}")

    def view(self, segment: int, size: int) -> memoryview:
        """The block in a message: ``size`` writable bytes for the caller.

        It is returned when the last reference to the view, a slice of it, or a tensor over it (``torch.frombuffer``) is
        gone, in any thread, even after ``close``. Do not ``release()`` it: a tensor over it would not notice.

        Raises:
            ProtocolError: no such block was sent.
        """
        with self._lock:
            memory = self._segments.get(segment)
            if memory is None:
                raise ProtocolError(f"received a block in unknown segment {segment!r}")
            if not 0 < size <= len(memory):
                raise ProtocolError(
                    f"received a block of {size} bytes in segment {segment}: expected 1 to {len(memory)}"
                )
            self._expect_sent(segment)
            block = type(memory).from_buffer(memory)  # keeps the memory mapped
            view = memoryview(block).cast("B")[:size]
            address = ctypes.addressof(memory)
            end = at_end_of(
                block, _free_block, self._page, segment, self._lent, address, os.getpid()
            )
            self._page[segment] = HELD
            self._lent[address] = _Lent(segment, size, weakref.ref(view), end)
        return view

    def give_home(self, address: int, size: int, *, is_alone: bool = False) -> int | None:
        """Return a block to the sender with its present content, if only one tensor still uses it.

        Args:
            address: the address of the tensor's memory. The caller has checked that nothing else refers to the tensor, and
                does not access it from here on.
            size: bytes of that memory.
            is_alone: whether the caller has also checked that there is no other view of the block.

        Returns:
            The segment's number; None if this is not a whole block, or something else uses it.
        """
        with self._lock:
            lent = self._lent.get(address)
            if lent is None or lent.size != size or self._page is _NO_PAGE:
                return None
            if not is_alone:
                view = lent.view()
                # Three references: by the tensor's memory, this function, and the call of getrefcount.
                if view is None or sys.getrefcount(view) != 3:
                    return None
            if lent.end.detach() is None:
                return None
            del self._lent[address]
            self._page[lent.segment] = HOME
            return lent.segment

    def discard(self, segment: int) -> None:
        """Return the block of an unwanted message.

        Raises:
            ProtocolError: no such block was sent.
        """
        if segment not in range(MAX_SEGMENTS):
            raise ProtocolError(
                f"received a block in segment {segment!r}: expected a number from 0 to {MAX_SEGMENTS - 1}"
            )
        with self._lock:
            self._expect_sent(segment)
            self._page[segment] = FREE

    def close(self) -> None:
        """Unmap unused segments now, and each of the others once its view is gone. Idempotent."""
        with self._lock:
            self._segments = {}
            # This object may live on: replace the page, so that it can be unmapped.
            self._page = _NO_PAGE

    def statistics(self) -> Statistics:
        """The present state. Segments that the peer has released count until it announces another one."""
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
        """Check that a block was sent. Called under the lock."""
        state = self._page[segment]
        if state != SENT:
            raise ProtocolError(
                f"received a block in segment {segment}, but none was sent there (its state is {state})"
            )


class _Lent(NamedTuple):
    """A view in use; ``end`` returns its block."""

    segment: int
    size: int
    view: weakref.ref[memoryview]
    end: weakref.finalize[..., Any]


def _free_block(
    page: memoryview, segment: int, lent: dict[int, _Lent], address: int, process: int
) -> None:
    """Return a block. A finalizer, so it takes no lock. Copies of views in forked children do not count."""
    if os.getpid() == process:
        lent.pop(address, None)
        page[segment] = FREE
