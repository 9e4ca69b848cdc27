"""The sender's end: memory that is leased for messages, and reused."""

from __future__ import annotations

import heapq
import math
import os
import time
from dataclasses import dataclass
from typing import Self

from rallypoint.errors import ProtocolError

from .budget import Budget
from .control import FREE, GONE, HOME, MAX_SEGMENTS, SENT, Statistics
from .segment import File, Memory, Segment, at_end_of, capacity_for, create, free_pages


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Memory leased for one message. Drop it once the message is sent: from then on the memory is the receiver's.

    Args:
        segment: the segment's number.
        size: bytes, as requested.
        capacity: bytes of the segment.
        view: writable, exactly ``size`` bytes.
        file: to be sent with the message; None: the peer has it already.
    """

    segment: int
    size: int
    capacity: int
    view: memoryview
    file: File | None


class Pool:
    """The sender's end of a connection: leases memory for messages to its one peer. Thread-safe.

    Must not be called in finalizers, which may run in the thread that holds the lock.
    """

    def __init__(self, budget: Budget, control: Memory) -> None:
        self._budget = budget
        self._page = memoryview(control).cast("B")
        self._process = os.getpid()
        self._closed = False
        self._segments: dict[int, Segment] = {}
        self._idle: dict[int, list[Segment]] = {}  # by capacity; the one freed last is last
        # One bit per leased segment, the lowest of its byte, so that one operation compares all with the page.
        self._leased = 0
        self._gaps: list[int] = []  # a heap: numbers below _top that no segment has
        self._top = 0

    @classmethod
    def open(cls, budget: Budget) -> tuple[Self, File]:
        """An empty pool, and its control page, which must be sent to the peer first.

        Raises:
            OSError: the system provides no file or memory.
        """
        file, control = create(MAX_SEGMENTS)
        pool = cls(budget, control)
        with budget.lock:
            budget.pools.add(pool)
        return pool, file

    def lease(self, size: int) -> Block | None:
        """Memory for ``size`` bytes. Its content is undefined.

        Returns:
            None if the budget is exhausted, even after releasing idle memory of all pools, if the system provides no
            memory, or if the pool is closed. The bytes must then be sent inline.

        Raises:
            ValueError: ``size`` is not positive.
        """
        if size <= 0:
            raise ValueError(f"cannot lease {size} bytes: expected at least 1")
        if os.getpid() != self._process:
            return None  # a forked child: memory and peer belong to the parent
        capacity = capacity_for(size)
        self._budget.on_use()
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
        free_pages(gone + (room or []))
        if room is None:
            return None
        try:
            created = create(capacity)
        except OSError:
            created = None
        with self._budget.lock:
            if created is None or self._closed:
                self._budget.used -= capacity
                heapq.heappush(self._gaps, number)
                return None
            file, memory = created
            segment = self._segments[number] = Segment(number, capacity, memory, file)
            return self._lend(segment, size)

    def told(self, block: Block) -> None:
        """Note that the block's ``file`` was sent to the peer, and is not needed again."""
        with self._budget.lock:
            segment = self._segments.get(block.segment)
            if segment is not None and segment.file is block.file:
                segment.file = None

    def take_back(self, block: Block) -> None:
        """Return a leased block whose message is not sent."""
        with self._budget.lock:
            segment = self._segments.get(block.segment)
            if segment is not None and segment.view is block.view:  # not lent again meanwhile
                self._page[block.segment] = FREE
                self.collect()

    def take_home(self, number: int, size: int) -> memoryview:
        """A block that the receiver returns with its present content; see :meth:`Mapped.view`.

        Raises:
            ProtocolError: no such block was returned.
        """
        with self._budget.lock:
            segment = self._expect_home(number)
            if not 0 < size <= segment.capacity:
                raise ProtocolError(
                    f"received back a block of {size} bytes in segment {number}: expected 1 to {segment.capacity}"
                )
            segment.is_home = True
            block = type(segment.memory).from_buffer(segment.memory)
            at_end_of(block, _let_go, self._page, segment, os.getpid())
        return memoryview(block).cast("B")[:size]

    def discard_home(self, number: int) -> None:
        """Discard a block that an unwanted message returns.

        Raises:
            ProtocolError: no such block was returned.
        """
        with self._budget.lock:
            self._expect_home(number)
            self._page[number] = FREE

    def _expect_home(self, number: int) -> Segment:
        """The segment of a returned block. Called under the lock."""
        segment = self._segments.get(number)
        if segment is None or segment.is_home or self._page[number] != HOME:
            raise ProtocolError(
                f"received back a block in segment {number!r}, but none was returned"
            )
        return segment

    def trim(self, before: float = math.inf) -> int:
        """Release the blocks that have been idle since before this time (monotonic seconds).

        Returns:
            The bytes released.
        """
        if os.getpid() != self._process:
            return 0
        with self._budget.lock:
            self.collect()
            gone = [each for each in self.idle_segments() if each.idle_since < before]
            for each in gone:
                self.forget(each)
        free_pages(gone)
        return sum(each.capacity for each in gone)

    def close(self) -> None:
        """Give up all memory, since the connection has ended. Idempotent.

        The peer may still be alive and read the blocks it holds. That memory is not touched or reused; the system frees
        it when the peer drops it or ends.
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
        free_pages(idle)

    def statistics(self) -> Statistics:
        """The present state."""
        with self._budget.lock:
            self.collect()
            idle = self.idle_segments()
            return Statistics(
                segments=len(self._segments),
                leased=len(self._segments) - len(idle),
                bytes=sum(each.capacity for each in self._segments.values()),
                idle_bytes=sum(each.capacity for each in idle),
            )

    # All of the following are called under the budget's lock.

    def collect(self) -> None:
        """Find the blocks that the receiver has returned."""
        if not self._leased:
            return
        freed = self._leased & ~int.from_bytes(self._page[: self._top], "little")
        if not freed:
            return
        self._leased ^= freed
        marks, now = freed.to_bytes(self._top, "little"), time.monotonic()
        number = marks.find(1)
        while number >= 0:
            segment = self._segments[number]
            if segment.is_home:
                # A block in use here: the peer must not free it.
                self._leased |= 1 << (8 * number)
                number = marks.find(1, number + 1)
                continue
            segment.view = None
            segment.freed = self._budget.freed
            segment.idle_since = now
            self._budget.freed += 1
            self._idle.setdefault(segment.capacity, []).append(segment)
            number = marks.find(1, number + 1)

    @property
    def has_leased(self) -> bool:
        """Whether any blocks are leased."""
        return bool(self._leased)

    def idle_segments(self) -> list[Segment]:
        """The segments that are not leased."""
        return [each for alike in self._idle.values() for each in alike]

    def forget(self, segment: Segment) -> None:
        """Remove a segment from the pool. The caller frees its pages if it was idle."""
        alike = self._idle.get(segment.capacity, [])
        if segment in alike:
            alike.remove(segment)
            self._page[segment.number] = GONE
        del self._segments[segment.number]
        self._budget.used -= segment.capacity
        heapq.heappush(self._gaps, segment.number)

    def _pop_idle(self, capacity: int) -> Segment | None:
        """An idle segment of this capacity, or of up to twice it: memory that is too large is still faster than fresh."""
        suitable = capacity
        while suitable < 2 * capacity:
            if self._idle.get(suitable):
                return self._idle[suitable].pop()
            suitable = capacity_for(suitable + 1)
        return None

    def _take_number(self) -> tuple[int | None, list[Segment]]:
        """The lowest free number, and the idle segment that was removed for it, if any."""
        gone: list[Segment] = []
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

    def _lend(self, segment: Segment, size: int) -> Block:
        view = memoryview(segment.memory).cast("B")[:size]
        segment.view = view
        self._leased |= 1 << (8 * segment.number)
        self._page[segment.number] = SENT
        return Block(segment.number, size, segment.capacity, view, segment.file)


def _let_go(page: memoryview, segment: Segment, process: int) -> None:
    """Release a block that has come home. A finalizer."""
    if os.getpid() == process:
        segment.is_home = False
        page[segment.number] = FREE
