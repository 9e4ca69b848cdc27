"""What this rank sends to its partners on other nodes, so that nothing is lost with its node.

Its own state goes out in each step, before the collective with which the others complete the step: the kernel takes it at once,
and sends it even if this process is killed. If a partner does not keep up, records are skipped, not queued. Snapshots are sent in
the background.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
from collections.abc import Sequence

from rallypoint._core import clock
from rallypoint._core.clock import Deadline
from rallypoint.elastic.storage.schedule import Held
from rallypoint.errors import ProtocolError
from rallypoint.wire.frames import encode
from rallypoint.wire.line import Line

from . import copy_line, partners
from .copy_line import CONTENTS, DONE, OWN, READY, Door
from .guests import Guests


_log = logging.getLogger(__name__)
# Seconds until a partner that has not answered is called again.
AGAIN = 10.0


class Copies:
    """Copies on other nodes, sent and received.

    Args:
        fd: of this rank's memory.
        rank: of this process.
        size: how many ranks there are.
        count: how many nodes keep each rank's state, including its own.
    """

    def __init__(self, fd: int, rank: int, size: int, count: int) -> None:
        self.guests = Guests(fd, rank, size)
        self._fd = fd
        self._rank = rank
        self.count = count
        self._generation = -1
        self._store_host = ""
        self._doors: dict[int, Door] = {}  # the partners'
        self._lines: dict[int, Line] = {}
        self._called: dict[int, float] = {}
        self._has_warned = False
        self._thread: threading.Thread | None = None
        self._is_copied = True
        self.spent = 0.0  # seconds of CPU time for the last snapshot

    def open(self, host: str, port: int) -> Door:
        """Open the door at which this rank takes others' copies.

        Args:
            host, port: of the workers' store.
        """
        self._store_host = host
        return self.guests.open(host, port)

    def connect(self, generation: int, nodes: Sequence[int], doors: Sequence[Door | None]) -> None:
        """Call the partners, after all have met.

        Args:
            generation: of the meeting.
            nodes: each rank's node.
            doors: each rank's door.
        """
        self._generation = generation
        found = partners.hosts(nodes, self._rank, self.count)
        self._doors = {rank: door for rank in found if (door := doors[rank]) is not None}
        self._called.clear()
        for rank in self._doors:
            self._dial(rank)

    @property
    def is_connected(self) -> bool:
        """Whether there are partners to send to."""
        return bool(self._doors)

    def of(self, nodes: Sequence[int], rank: int) -> tuple[int, ...]:
        """The ranks that keep a rank's copies, given the node of each rank."""
        return partners.hosts(nodes, rank, self.count)

    def cut(self, generation: int) -> None:
        """From any thread: after a loss, all meet in this generation. End every wait on older connections."""
        if self._generation < generation:
            for line in list(self._lines.values()):
                line.shut()

    def drain(self) -> None:
        """Before this rank meets the others: end all connections. What has arrived is kept."""
        self._hang_up()
        self.guests.drain()

    def resize(self, rank: int, size: int) -> None:
        """There are this many ranks from now on, and this process is one of them. Copies kept so far are nobody's any more."""
        self._rank = rank
        self.guests.resize(rank, size)

    def close(self) -> None:
        """The session ends."""
        self._hang_up()
        self.guests.close()

    def _hang_up(self) -> None:
        # The thread that sends a snapshot drops lines that break.
        for line in list(self._lines.values()):
            line.shut()
        self._join()
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _dial(self, rank: int) -> Line | None:
        now = clock.MONOTONIC.now()
        if now - self._called.get(rank, -math.inf) < AGAIN:
            return None
        self._called[rank] = now
        try:
            line = copy_line.dial(self._doors[rank], self._store_host, self._rank)
        except (OSError, ProtocolError) as error:
            self._note_failure(rank, error)
            return None
        self._lines[rank] = line
        return line

    def _note_failure(self, rank: int, error: Exception) -> None:
        _log.debug("rank %d: no copies at rank %d: %s", self._rank, rank, error)
        door = self._doors[rank]
        if not self._has_warned and not isinstance(error, ConnectionError):
            self._has_warned = True
            _log.warning(
                "rank %d cannot copy its state to rank %d at %s:%d (%s): if its node is lost, so is the state",
                *(self._rank, rank, door.host or self._store_host, door.port, error),
            )

    def _drop(self, rank: int, error: Exception) -> None:
        """The connection to a partner has ended: usually because of a loss, which the supervisor will report."""
        _log.debug("rank %d: the connection to rank %d broke: %s", self._rank, rank, error)
        line = self._lines.pop(rank, None)
        if line is not None:
            line.shut()
            line.close()

    # -- own state ----------------------------------------------------------------------------------

    def keep(self, steps: int, record: bytes) -> None:
        """Send this rank's own state.   Does not block, except to call a partner again.

        Args:
            steps: how many were complete.
            record: the packed state.
        """
        for rank in self._doors:
            line = self._lines.get(rank) or self._dial(rank)
            if line is None:
                continue
            try:
                if not line.is_full or line.flush():
                    line.send(encode(OWN, steps, record))
            except OSError as error:
                self._drop(rank, error)

    # -- snapshots ----------------------------------------------------------------------------------

    def begin(self, held: Held, begin: int, size: int, checksum: int) -> None:
        """Send a snapshot in the background. The previous one must be done: see :meth:`wait`.

        Args:
            held: the snapshot.
            begin: where its contents begin in the memory; they must stay until they are sent.
            size: in bytes.
            checksum: of the contents.
        """
        self._is_copied = False
        self._thread = threading.Thread(
            target=self._send,
            args=(held, begin, size, checksum),
            name="rally-copies",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> bool:
        """Wait until the last snapshot is copied. Returns whether all partners have it.

        Returns early after a loss.
        """
        self._join()
        return self._is_copied

    def _send(self, held: Held, begin: int, size: int, checksum: int) -> None:
        started = clock.thread_time()
        page = begin - begin % mmap.ALLOCATIONGRANULARITY
        is_copied = bool(self._doors)
        # Unmapped with the last reference: a connection that broke may hold one for a while.
        area = mmap.mmap(self._fd, begin - page + size, offset=page, prot=mmap.PROT_READ)
        contents = memoryview(area)[begin - page :]
        for rank in self._doors:
            line = self._lines.get(rank) or self._dial(rank)
            if line is None:
                is_copied = False
                continue
            try:
                _send_one(line, held, contents, checksum)
            except (OSError, ProtocolError) as error:
                is_copied = False
                self._drop(rank, error)
        self._is_copied = is_copied
        self.spent = clock.thread_time() - started


def _send_one(line: Line, held: Held, contents: memoryview, checksum: int) -> None:
    line.send(copy_line.offer(held, len(contents), checksum))
    line.push(Deadline(None))
    _await(line, READY, held.number)
    line.send(encode(CONTENTS, held.number, b"", [contents]))
    line.push(Deadline(None))
    _await(line, DONE, held.number)


def _await(line: Line, kind: int, number: int) -> None:
    while True:
        for frame in line.read(None):
            if (frame.kind, frame.call) != (kind, number):
                raise ProtocolError("a partner sent an unexpected answer")
            return
