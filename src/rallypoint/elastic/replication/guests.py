"""What this rank keeps for ranks of other nodes: their copies, received by threads into this rank's memory.

The supervisor holds the memory, so it outlives this process, and so do the copies. Each guest has a region of it, laid out like a
rank's own memory (:mod:`.memory`, :mod:`.slots`). The file is sparse, so a region takes only the space that is written.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from typing import Any

import torch

from rallypoint._core import addresses, env as environment, forks
from rallypoint._core.threaded_listener import ThreadedListener
from rallypoint.elastic.loops import own_state
from rallypoint.elastic.storage.memory import Memory, erase, newest_in
from rallypoint.elastic.storage.schedule import Held
from rallypoint.elastic.storage.slots import STRIDE, Slots
from rallypoint.errors import ProtocolError
from rallypoint.wire.frames import Frame, encode
from rallypoint.wire.line import Line

from . import copy_line
from .copy_line import CONTENTS, DONE, OFFER, OFFERED, OWN, READY, Door


_log = logging.getLogger(__name__)
# Seconds for the threads to read what has arrived.
DRAINING = 10.0
# Connections that may wait to be accepted: strangers must not fill the queue.
_BACKLOG = 128


def region(rank: int) -> int:
    """Where the copies of a rank begin."""
    return 4 * (rank + 1) * STRIDE


class Guests:
    """The receiving side.

    Args:
        fd: of this rank's memory.
        rank: of this process.
        size: how many ranks there are.
    """

    def __init__(self, fd: int, rank: int, size: int) -> None:
        self._fd = fd
        self._rank = rank
        self.size = size
        self._lock = forks.Lock()  # the slots
        self._slots: dict[int, Slots] = {}
        self._token = secrets.token_bytes(32).hex()
        self._listener: ThreadedListener | None = None
        self._stranger_told = False

    def open(self, store_host: str, store_port: int) -> Door:
        """Listen, if not listening already.

        Args:
            store_host, store_port: of the workers' store, in whose direction the other nodes are.
        Raises:
            OSError: no port is free.
        """
        found = addresses.address_towards(store_host, store_port)
        told = "" if addresses.is_loopback(found) else found
        if self._listener is None:
            with forks.opening():
                bind = environment.get("RALLY_BIND")  # --bind
                listener = addresses.bind_only(addresses.listening_address(bind, told), 0)
                listener = forks.close_in_child(listener)
            listener.listen(max(self.size, _BACKLOG))
            self._listener = ThreadedListener(listener, self._serve, "rally-guest")
        return Door(told, self._listener.port, self._token)

    def drain(self) -> None:
        """After a loss: end all connections, once what has arrived is read. This includes the last that a lost rank sent."""
        if self._listener is not None:
            self._listener.drain(DRAINING)

    def resize(self, rank: int, size: int) -> None:
        """There are this many ranks from now on, and this process is one of them. Copies kept so far are nobody's any more.

        No guest may be connected.
        """
        for each in range(self.size):
            erase(self._fd, region(each))
        self._rank, self.size = rank, size

    def close(self) -> None:
        """Stop listening; the memory stays."""
        if self._listener is not None:
            self._listener.close()
        self.drain()
        for each in self._slots.values():
            each.close()

    # -- what is kept -------------------------------------------------------------------------------

    def own_of(self, rank: int) -> bytes:
        """The newest complete record of a guest's own state; empty if there is none."""
        return newest_in(self._fd, region(rank)) or b""

    def held(self) -> tuple[tuple[int, tuple[Held, ...]], ...]:
        """The complete snapshots of all guests. Reads all of them."""
        with self._lock:
            found = (
                (rank, self._slots_of(rank).check()) for rank in range(self.size) if self._has(rank)
            )
            return tuple((rank, held) for rank, held in found if held)

    def contents(self, rank: int, held: Held) -> tuple[torch.Tensor, int]:
        """A guest's snapshot (``[n]``, uint8; the caller must not keep it), and its checksum."""
        with self._lock:
            slots = self._slots_of(rank)
            return slots.read(held), slots.place(held)[2]

    def drop_after(self, number: int) -> None:
        """Drop all newer snapshots."""
        with self._lock:
            for each in self._slots.values():
                each.drop_after(number)

    def _has(self, rank: int) -> bool:
        return rank in self._slots or Slots.is_written(self._fd, region(rank))

    def _slots_of(self, rank: int) -> Slots:
        if rank not in self._slots:
            self._slots[rank] = Slots(self._fd, region(rank))
        return self._slots[rank]

    # -- threads --------------------------------------------------------------------------------------

    def _serve(self, sock: socket.socket, welcome: Callable[[], None]) -> None:
        """Serve one connection until it ends."""
        line: Line | None = None
        guest: _Guest | None = None
        try:
            place = _Place()
            rank, line = copy_line.welcome(sock, self._token, self._rank, place.allocate)
            welcome()
            guest = _Guest(self, rank, line, place)
            while True:
                for frame in line.read(None):
                    guest.take(frame)
        except OSError:
            pass  # the connection has ended: the supervisor reports why
        except ProtocolError as error:
            # Warn once for all strangers: there may be hundreds per second.
            level = (
                logging.WARNING if guest is not None or not self._stranger_told else logging.INFO
            )
            self._stranger_told |= guest is None
            _log.log(level, "a copy of another rank's state was refused: %s", str(error))
        finally:
            if guest is not None:
                guest.close()
            if line is not None:
                line.close()

    def memory_for(self, rank: int, size: int) -> memoryview:
        """Memory for a snapshot of this many bytes, in place of the guest's older one."""
        with self._lock:
            return self._slots_of(rank).prepare(size)

    def complete(self, rank: int, held: Held, size: int, checksum: int) -> bool:
        """A snapshot has arrived. Returns whether it is what was sent."""
        with self._lock:
            return self._slots_of(rank).complete(held, size, checksum)

    def memory_of(self, rank: int) -> Memory:
        """The memory for a guest's own state."""
        return Memory(self._fd, region(rank))


class _Place:
    """Where the buffer of the next frame goes."""

    def __init__(self) -> None:
        self.memory: memoryview | None = None

    def allocate(self, size: int) -> Any:
        memory, self.memory = self.memory, None
        return bytearray(size) if memory is None or len(memory) < size else memory


class _Guest:
    """A rank of another node while it is connected."""

    def __init__(self, guests: Guests, rank: int, line: Line, place: _Place) -> None:
        if not 0 <= rank < guests.size:
            raise ProtocolError(f"there is no rank {rank}")
        self._guests = guests
        self._rank = rank
        self._line = line
        self._place = place
        self._memory: Memory | None = None
        self._steps = -1
        self._newest = self._before = b""
        self._offered: tuple[Held, int, int] | None = None

    def take(self, frame: Frame) -> None:
        """A frame has arrived.

        Raises:
            ProtocolError: the frame makes no sense, or a snapshot is not what was sent.
        """
        if frame.kind == OWN:
            self._keep(frame.call, bytes(frame.payload))
        elif frame.kind == OFFER:
            steps, size, checksum = OFFERED.unpack(frame.payload)
            self._offered = Held(frame.call, steps), size, checksum
            self._place.memory = self._guests.memory_for(self._rank, size)
            self._line.send(encode(READY, frame.call, b""))
        elif frame.kind == CONTENTS and self._offered is not None:
            offered, self._offered = self._offered, None
            if not self._guests.complete(self._rank, *offered):
                raise ProtocolError(f"a snapshot of rank {self._rank} is damaged")
            self._line.send(encode(DONE, frame.call, b""))
        else:
            raise ProtocolError(
                f"rank {self._rank} sent a message of the unknown kind {frame.kind}"
            )

    def _keep(self, steps: int, record: bytes) -> None:
        if self._memory is None:
            self._memory = self._guests.memory_of(self._rank)
            if self._memory.held is not None:
                self._newest, self._before = own_state.halves(self._memory.held)
                self._steps = own_state.OwnState.unpack(self._newest).steps
        if steps != self._steps:
            # The previous record is of use only if it is of the previous step.
            self._before = self._newest if steps == self._steps + 1 else b""
        self._steps, self._newest = steps, record
        self._memory.keep(own_state.joined(self._newest, self._before))

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
