"""Liveness: this node beats, and watches its neighbour. Apart from membership, on a connection of its own.

Two signs of death, and each is enough:

- *The beat stands still.* Every node writes a number under its own key ten times in a lease. Whoever watches
  it notes, on its own clock, when the number last changed (:mod:`.lease`). This finds a silent host.
- *The process ended.* Each node listens on a port and says nothing there: the kernel ends the connection
  of a watcher in the moment the process ends. If a second attempt is then refused, there
  is nobody. This finds a killed process on a living host within milliseconds.

Each node watches its predecessor in rank order (rank 0 the last); rank 0 also reads everybody's beats. So
the cost for each node does not depend on how many there are. Once somebody is lost it watches all the
predecessors it knows, at once: neighbours may have been killed together. The same while the nodes look for
a lost store, where nothing but a proof of death counts.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rallypoint._core import addresses, forks
from rallypoint._core.clock import MONOTONIC
from rallypoint.errors import RallyError, RendezvousConnectionError

from .held_lines import HeldLines
from .lease import Leases
from .record_store import RecordStore


# Beats in one lease.
BEATS = 10
# A connection that was refused is no proof by itself (an address may be another host's here); with a beat
# that stands still for so many beats it is.
BEATS_AFTER_REFUSAL = 4

# Seconds in which a connection was made and cut off again, as where strangers crowd a port.
_CUT_AGAIN = 0.1

# How a loss is told.
ENDED = "has ended unexpectedly (its process is gone)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A node that is watched.

    Args:
        node_id: whose beat to read.
        rank: in the round.
        host: its host name, for messages.
        addr: where its process can be watched; None where it cannot.
    """

    node_id: str
    rank: int
    host: str
    addr: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that is gone; ``certain`` if its process is known to have ended."""

    neighbour: Neighbour
    certain: bool
    reason: str
    left: bool = False


class WatchPost:
    """The port by which others see that this process lives. Nothing is ever read from it.

    A thread takes the connections: one that its watcher has given up would stay in the kernel's queue,
    and once that is full nobody can see any more that we live. It holds a limited number of them: strangers who open
    more have their own closed, and a watcher whose connection was among them makes another.

    Args:
        host: the address to listen on; None: all of this machine's.
    """

    PAUSE = 0.1

    def __init__(self, host: str | None = None) -> None:
        # A copy in a child would keep this process alive for its watchers.
        with forks.opening():
            self._socket = forks.close_in_child(addresses.bind_only(host, 0))
        self._socket.listen(addresses.BACKLOG)
        self._socket.setblocking(False)
        self._stop_read, self._stop_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rally-watch-post", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def close(self) -> None:
        """A second call does nothing."""
        if self._stop_write < 0:
            return
        # Written to, not only closed: a forked child may have a copy of it.
        os.write(self._stop_write, b".")
        self._thread.join()
        os.close(self._stop_write)
        self._stop_write = -1
        os.close(self._stop_read)
        self._socket.close()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._stop_read, select.POLLIN)
        poller.register(self._socket, select.POLLIN)
        lines = HeldLines(self._socket, poller)
        while True:
            for fd, _ in lines.newcomers_last(poller.poll()):
                if fd == self._stop_read:
                    lines.close()
                    return
                if fd == self._socket.fileno():
                    if not lines.accept():
                        select.select([self._stop_read], [], [], self.PAUSE)
                elif fd in lines:  # it says something, which nobody should, or it ends
                    lines.take(fd).close()


class Pulse:
    """One thread that beats and watches.

    Args:
        connect: opens a connection of its own, when it is first needed.
        node_id: this node's.
        lease: seconds of silence after which a node is lost.
        on_loss: called from this thread for each node that is lost.
        on_store_lost: called from this thread, once, when the store is gone; the thread ends.
        delay: seconds before the first beat, so that not all of thousands begin in the same moment.
        numbers: of the beats, growing; those of a node go on where its pulse before has ended.
    """

    def __init__(
        self,
        connect: Callable[[], RecordStore],
        node_id: str,
        lease: float,
        on_loss: Callable[[Loss], None],
        on_store_lost: Callable[[RendezvousConnectionError], None],
        delay: float = 0.0,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._connect = connect
        self._records: RecordStore | None = None
        self._delay = delay
        self._node_id = node_id
        self._interval = lease / BEATS
        self._lease = lease
        self._on_loss = on_loss
        self._on_store_lost = on_store_lost
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._lock = threading.Lock()
        self._order: Sequence[Neighbour] = ()  # all that may be watched, nearest first
        self._everybody: Sequence[Neighbour] = ()
        self._at_each_beat: Callable[[RecordStore], None] | None = None
        self._only_proof = False
        self._round = 0
        self._lost: set[str] = set()
        self._proven: set[str] = set()  # of those, whose end is certain
        self._stopping = False
        self._leaving = False
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rally-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(
        self,
        nearest_first: Sequence[Neighbour],
        everybody: Sequence[Neighbour] = (),
        at_each_beat: Callable[[RecordStore], None] | None = None,
    ) -> None:
        """Whom to watch from now on: the first of one list that is alive, and all of the other by their heartbeats."""
        self._watch(nearest_first, everybody, at_each_beat, only_proof=False)

    def prove(self, nodes: Sequence[Neighbour]) -> None:
        """Find out which of these have ended, all at once. One that is merely silent is not lost."""
        self._watch(nodes, (), None, only_proof=True)

    def _watch(
        self,
        nearest_first: Sequence[Neighbour],
        everybody: Sequence[Neighbour],
        at_each_beat: Callable[[RecordStore], None] | None,
        *,
        only_proof: bool,
    ) -> None:
        with self._lock:
            self._order, self._everybody = tuple(nearest_first), tuple(everybody)
            self._at_each_beat = at_each_beat
            self._only_proof = only_proof
            self._round += 1
            self._lost.clear()
            self._proven.clear()
            self._wake()

    def stop(self, *, leaving: bool, timeout: float) -> None:
        """End the thread; ``leaving``: its last beat says that this node has left in good order."""
        with self._lock:
            self._stopping, self._leaving = True, leaving
            self._wake()
        self._thread.join(timeout)

    def _wake(self) -> None:
        if self._write < 0:
            return  # the thread has ended
        try:
            os.write(self._write, b"x")
        except BlockingIOError:
            pass  # it is awake

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        lines: dict[Neighbour, _Line] = {}
        try:
            self._loop(lines)
        except RendezvousConnectionError as error:
            if not self._stopping:
                self._on_store_lost(error)
        except (
            RallyError,
            TimeoutError,
        ) as error:  # an answer that did not come, or makes no sense
            if not self._stopping:
                self._on_store_lost(RendezvousConnectionError(str(error)))
        finally:
            for line in lines.values():
                line.close()
            if self._records is not None:
                self._records.close()
            with self._lock:
                os.close(self._read)
                os.close(self._write)
                self._write = -1

    def _loop(self, lines: dict[Neighbour, _Line]) -> None:
        seen_round = 0
        # A lease is over when a whole one has passed since the last move, seen at the next beat.
        leases: Leases[str] = Leases(self._lease - self._interval)
        refused: Leases[str] = Leases(self._interval * BEATS_AFTER_REFUSAL)
        next_beat = MONOTONIC.now() + self._delay
        while True:
            with self._lock:
                stopping, leaving, round_ = self._stopping, self._leaving, self._round
                at_each_beat, only_proof = self._at_each_beat, self._only_proof
                order = [each for each in self._order if each.node_id not in self._proven]
                if not self._lost and not only_proof:
                    order = order[:1]
                everybody = [each for each in self._everybody if each.node_id not in self._lost]
            if stopping:
                if leaving:
                    self._beat(left=True)
                return
            if round_ != seen_round:
                seen_round = round_
                leases = Leases(self._lease - self._interval)
                refused = Leases(self._interval * BEATS_AFTER_REFUSAL)
            _hold(lines, order)
            now = MONOTONIC.now()
            if now >= next_beat:
                self._beat()
                watched = {each.node_id: each for each in (*everybody, *order)}
                suspects = [each.node_id for each, line in lines.items() if line.refused]
                self._look(watched, None if only_proof else leases, refused, suspects)
                for line in lines.values():
                    line.try_again(self._lease)
                if at_each_beat is not None:
                    at_each_beat(self._connected())
                next_beat = MONOTONIC.now() + self._interval
            _poll(lines.values(), self._read, max(0.0, next_beat - MONOTONIC.now()))
            for neighbour in [each for each, line in lines.items() if line.ended]:
                self._heed_end(neighbour)

    def _connected(self) -> RecordStore:
        if self._records is None:
            self._records = self._connect()
        return self._records

    def _beat(self, *, left: bool = False) -> None:
        body: dict[str, Any] = {"beat": next(self._numbers)}
        if left:
            body["left"] = True
        self._connected().write(f"beat/{self._node_id}", body)

    def _look(
        self,
        watched: Mapping[str, Neighbour],
        leases: Leases[str] | None,
        refused: Leases[str],
        suspects: Sequence[str],
    ) -> None:
        if not watched:
            return
        ids = list(watched)
        keys = [f"beat/{each}" for each in ids]
        records = self._connected()
        bodies = [records.peek(keys[0])] if len(keys) == 1 else records.look(keys)
        numbers = {}
        for each, body in zip(ids, bodies, strict=True):
            number = None if body is None else body.get("beat")
            numbers[each] = number if isinstance(number, int) else -1
            if body is not None and body.get("left") is True:
                neighbour = watched[each]
                self._lose(Loss(neighbour, True, _lost(neighbour, "has left"), left=True))
        now = MONOTONIC.now()
        # Certain losses first: of one that is told as silent nobody would expect more.
        doubtful = {each: numbers[each] for each in suspects if each in numbers}
        for each in refused.observe(now, doubtful):
            self._lose(Loss(watched[each], True, _lost(watched[each], ENDED)))
        if leases is None:
            return
        for each in leases.observe(now, numbers):
            seconds = f"has been silent for {self._lease:g} s"
            self._lose(Loss(watched[each], False, _lost(watched[each], seconds)))

    def _heed_end(self, neighbour: Neighbour) -> None:
        """Its process has ended: killed, or after it had said in its last beat that it leaves?"""
        try:
            body = self._connected().peek(f"beat/{neighbour.node_id}")
        except RendezvousConnectionError:  # it served the store, too
            self._lose(Loss(neighbour, True, _lost(neighbour, ENDED)))
            raise
        left = body is not None and body.get("left") is True
        self._lose(Loss(neighbour, True, _lost(neighbour, "has left" if left else ENDED), left))

    def _lose(self, loss: Loss) -> None:
        node_id = loss.neighbour.node_id
        with self._lock:
            # One that fell silent may be found to have ended later: that is told as well.
            if node_id in (self._proven if loss.certain else self._lost):
                return
            self._lost.add(node_id)
            if loss.certain:
                self._proven.add(node_id)
        self._on_loss(loss)


class _Line:
    """The connection to a neighbour's watch post, without a blocking call.

    ``ended``: it broke, and a second attempt was refused. ``refused``: already the first one was.
    """

    def __init__(self, to: Neighbour) -> None:
        self._to = to
        self._socket: socket.socket | None = None
        self._connected = False
        self._again = False
        self._tried = 0.0
        self._is_cut = False
        self._found: tuple[Any, ...] | None = None  # by the resolver
        self.ended = False
        self.refused = False
        self._open()

    def _open(self) -> None:
        self.ended = self._connected = False
        self._tried = MONOTONIC.now()
        if self._to.addr is None:
            return
        try:
            if self._found is None:
                self._found = socket.getaddrinfo(*self._to.addr, type=socket.SOCK_STREAM)[0]
            family, kind, protocol, _, address = self._found
            self._socket = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
            self._socket.setblocking(False)
            self._settle(self._socket.connect_ex(address))
        except OSError:
            self.close()  # no way there: its beat must do

    def try_again(self, pause: float) -> None:
        """Where there was no way: try once more, ``pause`` seconds after the last attempt; at once after a cut."""
        # A name that was not found is not looked up again: that may take longer than a beat may be late.
        if self._found is None or self._socket is not None or self.refused or self.ended:
            return
        if self._is_cut or MONOTONIC.now() >= self._tried + pause:
            self._is_cut = False
            self._open()

    def _settle(self, code: int) -> None:
        """A connection attempt has come to this."""
        if code == errno.EINPROGRESS:
            return
        if code == 0:
            self._connected = True
            return
        self.close()
        if code == errno.ECONNREFUSED:
            if self._again:
                self.ended = True
            else:
                self.refused = True

    def register(self, poller: select.poll) -> int:
        """Have it tell of news; the descriptor it will be known by, or -1."""
        if self._socket is None:
            return -1
        poller.register(self._socket, select.POLLIN if self._connected else select.POLLOUT)
        return self._socket.fileno()

    def hear(self) -> None:
        """There are news."""
        sock = self._socket
        if sock is None:
            return
        if not self._connected:
            self._settle(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            return
        try:
            if sock.recv(64):
                return  # nothing is said on this line
        except BlockingIOError:
            return
        except OSError:
            pass
        # Ended, or was it only the connection? Whoever is refused now knows.
        self.close()
        # One after the other: strangers crowd the port there, and it may take a while. The next beat will do.
        self._is_cut = self._again and MONOTONIC.now() < self._tried + _CUT_AGAIN
        self._again = True
        if not self._is_cut:
            self._open()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._connected = False


def _hold(lines: dict[Neighbour, _Line], to: Sequence[Neighbour]) -> None:
    """Have a line to each of these, and to no others."""
    for each in lines.keys() - set(to):
        lines.pop(each).close()
    for each in to:
        if each not in lines:
            lines[each] = _Line(each)


def _poll(lines: Iterable[_Line], wake_fd: int, timeout: float) -> None:
    """Wait for news of a line, or for a byte on ``wake_fd``, at most ``timeout`` seconds."""
    poller = select.poll()
    poller.register(wake_fd, select.POLLIN)
    by_fd = {line.register(poller): line for line in lines}
    # A line may have come to its end when it was opened.
    until = 0.0 if any(line.ended for line in by_fd.values()) else timeout * 1000 + 1
    for fd, _ in poller.poll(until):
        if fd == wake_fd:
            os.read(wake_fd, 4096)
        else:
            by_fd[fd].hear()


def _lost(neighbour: Neighbour, how: str) -> str:
    host = f" on {neighbour.host}" if neighbour.host else ""
    return f"node {neighbour.rank} is lost: it{host} {how}"
