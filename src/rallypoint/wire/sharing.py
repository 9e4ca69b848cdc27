"""Shared memory between the two ends of a Unix socket, in both directions.

The descriptor of each segment is sent once, on a *side* socket, before the first message that refers to the segment and
marks it as new. So the main socket can be read without asking the kernel for descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, ProtocolError

from .buffers import Move, address_of, copy_into
from .frames import INLINE, Buffer, Shared
from .shm import SMALLEST, Block, Budget, Mapped, Pool


_CONTROL = INLINE
# ``Shared.slot``: a block of the sender, or one of the receiver that is returned.
_OWN, _HOME = 0, 1
# Bytes copied between two checks of the deadline. With fresh pages they may take a second.
_AT_ONCE = 32 << 20
_ENTRY = struct.Struct("<QI")
_FD = struct.Struct("i")


class Sharing:
    """One end.

    Args:
        side: a socket to the other end, only for descriptors; this object owns it.
        budget: limits the memory of all connections of this process.
        move: copies large blocks, as :meth:`~.copying.Copier.move` does.

    Raises:
        OSError: the other end is gone, or there is no memory. ``side`` is closed then.
    """

    def __init__(self, side: socket.socket, budget: Budget, move: Move = ctypes.memmove) -> None:
        self._side = side
        self._move = move
        self._send_lock = threading.Lock()
        self._take_lock = threading.Lock()
        self._mapped: Mapped | None = None
        self._early: set[int] = set()
        try:
            # Non-blocking: a descriptor is in the receiver's queue before the message that needs it is sent. If it is
            # not there when the message arrives, it was never sent.
            side.setblocking(False)
            self._pool, control = Pool.open(budget)
        except OSError:
            side.close()
            raise
        try:
            self._send(_CONTROL, 0, control.fileno())
        except OSError:
            self.close()
            raise

    def place(
        self,
        buffers: Sequence[memoryview],
        least: int = SMALLEST,
        home: int = 0,
        *,
        is_alone: bool = False,
        deadline: Deadline | None = None,
    ) -> tuple[list[Shared | memoryview], list[Block]]:
        """Copy buffers of at least ``least`` bytes into shared memory.

        Args:
            home: the address of a buffer that only the caller refers to. If it is a block from the other end, it is
                returned in place.
            is_alone: whether the caller has also checked that nothing else refers to the block.

        Returns:
            What to send, and the blocks, for :meth:`take_back` if it is not sent.

        Raises:
            DeadlineExceeded: copying took too long. Nothing may be sent.
        """
        placed: list[Shared | memoryview] = []
        # Copied but not announced yet, so that they can be taken back.
        copied: list[tuple[int, Block]] = []
        for each in buffers:
            if home and self._mapped is not None and address_of(each) == home:
                segment = self._mapped.give_home(home, each.nbytes, is_alone=is_alone)
                if segment is not None:
                    placed.append(Shared(segment, _HOME, 0, each.nbytes))
                    continue
            block = self._pool.lease(each.nbytes) if each.nbytes >= least else None
            if block is not None:
                copied.append((len(placed), block))
                try:
                    self._copy(block.view, each, deadline)
                except DeadlineExceeded:
                    for _, one in copied:
                        self._pool.take_back(one)
                    raise
            placed.append(each)
        blocks: list[Block] = []
        for index, block in copied:
            if self._announce(block):
                is_new = block.file is not None
                placed[index] = Shared(block.segment, _OWN, int(is_new), block.size)
                blocks.append(block)
        return placed, blocks

    def _copy(self, target: memoryview, source: memoryview, deadline: Deadline | None) -> None:
        if deadline is None or target.nbytes <= _AT_ONCE:
            copy_into(target, source, self._move)
            return
        source = source.cast("B")
        for start in range(0, target.nbytes, _AT_ONCE):
            if deadline.expired():
                raise DeadlineExceeded(
                    f"only {start} of {target.nbytes} bytes could be copied in time"
                )
            end = start + _AT_ONCE
            copy_into(target[start:end], source[start:end], self._move)

    def take_back(self, blocks: Sequence[Block]) -> None:
        """Take back the blocks of a message that is not sent."""
        for each in blocks:
            # The descriptor of a new one was sent, but its message never will be. So its number cannot be reused
            # while the connection lasts.
            if each.file is None:
                self._pool.take_back(each)

    def take(self, buffers: Sequence[Buffer | Shared]) -> list[Buffer]:
        """The memory of a message's buffers. Shared blocks are returned once nothing here refers to them.

        Raises:
            ProtocolError: there is no such block.
        """
        return [self._view(each) if isinstance(each, Shared) else each for each in buffers]

    def discard(self, buffers: Sequence[Any]) -> None:
        """Return the memory of an unwanted message."""
        for each in buffers:
            if isinstance(each, Shared):
                with contextlib.suppress(ProtocolError):
                    if each.slot == _HOME:
                        self._pool.discard_home(each.segment)
                    else:
                        self._find(each).discard(each.segment)

    def statistics(self) -> dict[str, int]:
        sent = self._pool.statistics()
        got = self._mapped.statistics() if self._mapped is not None else None
        return {
            "shared_segments": sent.segments,
            "shared_bytes": sent.bytes,
            "shared_leased": sent.leased,
            "mapped_segments": got.segments if got else 0,
            "mapped_bytes": got.bytes if got else 0,
        }

    def close(self) -> None:
        """Release the memory that no tensor uses."""
        self._side.close()
        self._pool.close()
        if self._mapped is not None:
            self._mapped.close()

    def _view(self, shared: Shared) -> memoryview:
        if shared.slot == _HOME:
            return self._pool.take_home(shared.segment, shared.size)
        if shared.slot != _OWN:
            raise ProtocolError(
                f"received a block with slot {shared.slot}: expected {_OWN} (the sender's) or {_HOME} (ours)"
            )
        return self._find(shared).view(shared.segment, shared.size)

    def _find(self, shared: Shared) -> Mapped:
        with self._take_lock:
            if self._mapped is None:
                number, _, fd = self._receive()
                if number != _CONTROL:
                    os.close(fd)
                    raise ProtocolError("received shared memory before its control page")
                self._mapped = Mapped.open(fd)
            if shared.offset:
                while shared.segment not in self._early:
                    number, capacity, fd = self._receive()
                    self._mapped.add(number, fd, capacity)
                    self._early.add(number)
                self._early.discard(shared.segment)
            return self._mapped

    def _announce(self, block: Block) -> bool:
        """Send the descriptor of a new segment; False if that is impossible now."""
        if block.file is None:
            return True
        try:
            self._send(block.segment, block.capacity, block.file.fileno())
        except OSError:
            # The queue is full, since the peer reads descriptors only with their messages. Or the peer is gone, which
            # sending the message will show.
            self._pool.take_back(block)
            return False
        self._pool.told(block)
        return True

    def _send(self, number: int, capacity: int, fd: int) -> None:
        with self._send_lock:
            self._side.sendmsg(
                [_ENTRY.pack(capacity, number)],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))],
            )

    def _receive(self) -> tuple[int, int, int]:
        try:
            # Not socket.recv_fds, which drops the flag: children would inherit the descriptor.
            data, ancillary, _, _ = self._side.recvmsg(
                _ENTRY.size, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise ProtocolError(f"received no descriptor for shared memory: {error}") from None
        fds = [fd for _, _, each in ancillary for (fd,) in _FD.iter_unpack(each)]
        if len(fds) != 1 or len(data) != _ENTRY.size:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(
                f"received {len(data)} bytes with {len(fds)} descriptors for shared memory: expected {_ENTRY.size} with 1"
            )
        capacity, number = _ENTRY.unpack(data)
        return number, capacity, fds[0]
