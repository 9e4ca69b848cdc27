"""The receiver's end: the blocks that the peer's messages name."""

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


# Of a receiver that has closed: it is read only.
_NO_PAGE: Final = memoryview(bytes(MAX_SEGMENTS))


class Mapped:
    """The receiver's end of a connection: finds the blocks that the peer's messages name. Thread-safe.

    After a fork the child may read what the parent holds, as long as the parent holds it.
    """

    def __init__(self, control: Memory, limit_bytes: int | None = None) -> None:
        self._page = memoryview(control).cast("B")
        self._limit_bytes = limit_bytes
        self._segments: dict[int, Memory] = {}
        # Views that are in use, by where their memory begins.
        self._lent: dict[int, _Lent] = {}
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
        return cls(map_received(File(control_fd), MAX_SEGMENTS, "the control page"), limit_bytes)

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
        if self._page[segment] == HELD:
            raise ProtocolError(f"segment {segment} was announced anew while its memory is in use")
        with self._lock:
            for each in [n for n in self._segments if n == segment or self._page[n] == GONE]:
                del self._segments[each]
            mapped = sum(map(len, self._segments.values()))
            if self._limit_bytes is not None and mapped + capacity > self._limit_bytes:
                raise ProtocolError(
                    f"segment {segment} of {capacity} bytes was announced beside {mapped} bytes:"
                    f" expected at most {self._limit_bytes} altogether"
                )
            self._segments[segment] = map_received(received, capacity, f"segment {segment}")

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
            view = memoryview(block).cast("B")[:size]
            address = ctypes.addressof(memory)
            end = at_end_of(
                block, _free_block, self._page, segment, self._lent, address, os.getpid()
            )
            self._page[segment] = HELD
            self._lent[address] = _Lent(segment, size, weakref.ref(view), end)
        return view

    def give_home(self, address: int, size: int, *, is_alone: bool = False) -> int | None:
        """Hand a block back to the sender with what is in it now, if one tensor alone is left of all that used it.

        Args:
            address: where the tensor's memory begins. The caller has made sure that nobody else refers to the tensor,
                and neither reads nor writes it from here on.
            is_alone: whether they have made sure, too, that no other view of the block is left.
            size: bytes of that memory.

        Returns:
            the segment's number; None if that is no block, not all of one, or one that others use as well.
        """
        with self._lock:
            lent = self._lent.get(address)
            if lent is None or lent.size != size or self._page is _NO_PAGE:
                return None
            if not is_alone:
                view = lent.view()
                # The tensor's memory has one reference, this function another, and the call that counts the third.
                if view is None or sys.getrefcount(view) != 3:
                    return None
            if lent.end.detach() is None:
                return None
            del self._lent[address]
            self._page[lent.segment] = HOME
            return lent.segment

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
            self._page[segment] = FREE

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
        if state != SENT:
            raise ProtocolError(
                f"a block came in segment {segment}, but none is on its way there (its state is {state})"
            )


class _Lent(NamedTuple):
    """A view that is in use; ``end`` gives its block back."""

    segment: int
    size: int
    view: weakref.ref[memoryview]
    end: weakref.finalize[..., Any]


def _free_block(
    page: memoryview, segment: int, lent: dict[int, _Lent], address: int, process: int
) -> None:
    """A finalizer, so it takes no lock. A fork's copy of a view is not what the sender waits for."""
    if os.getpid() == process:
        lent.pop(address, None)
        page[segment] = FREE
