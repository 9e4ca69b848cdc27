"""Liveness: this node sends heartbeats and watches its neighbour. Separate from membership, over its own connection.

A node is lost on either of two signs:

- *Its heartbeat stops.* Every node writes a growing number under its own key ten times per lease. Its watcher
  notes, on the watcher's own clock, when the number last changed (:mod:`.lease`). This detects a silent host.
- *Its process ended.* Each node listens on a port and sends nothing there. When the process exits, the kernel closes its
  watchers' connections. If a second attempt is then refused, the process is gone. This detects a killed
  process on a living host within milliseconds.

Each node watches its predecessor in rank order (rank 0 watches the last); rank 0 also reads all heartbeats. So
the cost for any other node does not depend on the number of nodes. After a loss, a node watches all the predecessors it
knows at the same time, because neighbours may have been killed together. It does the same while the nodes look for
a lost store; in that case, only proof that a process has exited counts.
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

from rallypoint._core import addresses, forks, side_thread
from rallypoint._core.clock import MONOTONIC
from rallypoint.errors import RallyError, RendezvousConnectionError

from .held_lines import HeldLines
from .lease import Leases
from .record_store import RecordStore


# Beats in one lease.
BEATS = 10
# A refused connection alone proves nothing (from here, the address may be another host's). It is proof if the
# heartbeat has also been missing for this many intervals.
BEATS_AFTER_REFUSAL = 4

# A connection that ends within this many seconds was probably cut because strangers crowd the port.
_CUT_AGAIN = 0.1

# How a node was lost, for the message.
ENDED = "its process{on} has ended unexpectedly"
LEFT = "it has left"


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A node that is watched.

    Args:
        node_id: its id, under which it beats.
        rank: its rank in the round.
        host: its host name, for messages.
        addr: where its process can be watched; None if it cannot.
        generation: the round's generation.
    """

    node_id: str
    rank: int
    host: str
    addr: tuple[str, int] | None = None
    generation: int = -1


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that is gone; ``certain`` if its process is known to have exited."""

    neighbour: Neighbour
    certain: bool
    reason: str
    left: bool = False


class WatchPost:
    """The port at which other nodes see that this process is alive. Nothing is ever read from it.

    A thread accepts the connections: abandoned ones would stay in the kernel's queue, and once that was full no watcher
    could connect. The number of connections is limited: if strangers open too many, connections are closed, and a watcher
    whose connection was among them reconnects.

    Args:
        host: the address to listen on; None: all of this machine's.
    """

    PAUSE = 0.1

    def __init__(self, host: str | None = None) -> None:
        # If a child had a copy, this process would seem alive to its watchers after it exited.
        with forks.opening():
            self._socket = forks.close_in_child(addresses.bind_only(host, 0))
        self._socket.listen(addresses.BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._stop_read, self._stop_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rally-watch-post", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port. A second call does nothing."""
        if self._stop_write < 0:
            return
        # Write a byte, because closing is not enough: a forked child may have a copy.
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
                elif fd in lines:  # it sent data, which watchers never do, or it closed
                    lines.take(fd).close()


class Pulse:
    """The thread that sends heartbeats and watches other nodes.

    Args:
        connect: opens a connection to the store for this thread, when it is first needed.
        node_id: this node's.
        lease: seconds of silence after which a node is lost.
        on_loss: called from this thread for each node that is lost.
        on_store_lost: called from this thread, once, when the store is lost; then the thread exits.
        delay: seconds before the first heartbeat, so that thousands of nodes do not start at the same moment.
        numbers: growing numbers for the heartbeats; a node's next pulse continues where the previous one stopped.
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
        self._order: Sequence[Neighbour] = ()  # the nodes that may be watched, nearest first
        self._everybody: Sequence[Neighbour] = ()
        self._at_each_beat: Callable[[RecordStore], None] | None = None
        self._only_proof = False
        self._round = 0
        self._lost: set[str] = set()
        self._proven: set[str] = set()  # the lost nodes whose processes are known to have exited
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
        """From now on, watch the first living node of ``nearest_first`` and the heartbeats of ``everybody``."""
        self._watch(nearest_first, everybody, at_each_beat, only_proof=False)

    def prove(self, nodes: Sequence[Neighbour]) -> None:
        """Find out which of these nodes' processes have exited, all at once. A node that is only silent is not lost."""
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
        """Stop the thread; with ``leaving``, its last heartbeat says that this node has left in good order."""
        with self._lock:
            self._stopping, self._leaving = True, leaving
            self._wake()
        self._thread.join(timeout)

    def _wake(self) -> None:
        if self._write < 0:
            return  # the thread has exited
        try:
            os.write(self._write, b"x")
        except BlockingIOError:
            pass  # the pipe is full, so the thread will wake

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
        ) as error:  # an answer is missing or invalid
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
        # A lease expires when a whole one has passed since the last change. The next look notices, so one interval is taken off.
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
                self._lose(Loss(neighbour, True, _lost(neighbour, LEFT), left=True))
        now = MONOTONIC.now()
        # Certain losses first: otherwise the node would first be reported as merely silent.
        doubtful = {each: numbers[each] for each in suspects if each in numbers}
        for each in refused.observe(now, doubtful):
            self._lose(Loss(watched[each], True, _lost(watched[each], ENDED)))
        if leases is None:
            return
        for each in leases.observe(now, numbers):
            silent = f"its process{{on}} has been silent for {self._lease:g} s"
            self._lose(Loss(watched[each], False, _lost(watched[each], silent)))

    def _heed_end(self, neighbour: Neighbour) -> None:
        """Handle the exit of a neighbour's process. Its last heartbeat tells whether it left in good order."""
        try:
            body = self._connected().peek(f"beat/{neighbour.node_id}")
        except RendezvousConnectionError:  # it also served the store
            self._lose(Loss(neighbour, True, _lost(neighbour, ENDED)))
            raise
        left = body is not None and body.get("left") is True
        self._lose(Loss(neighbour, True, _lost(neighbour, LEFT if left else ENDED), left))

    def _lose(self, loss: Loss) -> None:
        node_id = loss.neighbour.node_id
        with self._lock:
            # A silent node may later prove to have exited; that is reported as well.
            if node_id in (self._proven if loss.certain else self._lost):
                return
            self._lost.add(node_id)
            if loss.certain:
                self._proven.add(node_id)
        self._on_loss(loss)


class _Line:
    """The connection to a neighbour's watch post. No call blocks.

    ``ended``: it broke, and a second attempt was refused. ``refused``: the first attempt was refused.
    """

    def __init__(self, to: Neighbour) -> None:
        self._to = to
        self._socket: socket.socket | None = None
        self._connected = False
        self._again = False
        self._tried = 0.0
        self._is_cut = False
        self._found: tuple[Any, ...] | None = None  # the resolved address
        self._looking_up = False
        self.ended = False
        self.refused = False
        self._open()

    def _open(self) -> None:
        self.ended = self._connected = False
        self._tried = MONOTONIC.now()
        if self._to.addr is None:
            return
        if self._found is None:
            self._look_up(*self._to.addr)
        if self._found is None:
            return
        try:
            family, kind, protocol, _, address = self._found
            self._socket = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
            self._socket.setblocking(False)
            self._settle(self._socket.connect_ex(address))
        except OSError:
            self.close()  # unreachable: only the heartbeat is left to go by

    def _look_up(self, host: str, port: int) -> None:
        """Resolve the address: a numeric one here, a name in a thread, since a lookup may outlast the next heartbeat."""
        numeric, name = socket.AI_NUMERICHOST, addresses.as_asked(host)
        try:
            self._found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=numeric)[0]
            return
        except OSError:
            pass  # it is a name

        def ask() -> None:
            try:
                self._found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
                self._is_cut = True  # so that the next heartbeat opens the connection
            except OSError:
                pass  # try again after a pause; meanwhile there is still the heartbeat
            finally:
                self._looking_up = False

        self._looking_up = True
        if not side_thread.begin(ask, "rally-lookup"):
            self._looking_up = False

    def try_again(self, pause: float) -> None:
        """If the node was unreachable, try again ``pause`` seconds after the last attempt; at once if the line was cut."""
        if self._looking_up or self._socket is not None or self.refused or self.ended:
            return
        if self._is_cut or MONOTONIC.now() >= self._tried + pause:
            self._is_cut = False
            self._open()

    def _settle(self, code: int) -> None:
        """Handle the result of a connection attempt."""
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
        """Register the connection with the poller. Returns its descriptor, or -1 if there is none."""
        if self._socket is None:
            return -1
        poller.register(self._socket, select.POLLIN if self._connected else select.POLLOUT)
        return self._socket.fileno()

    def hear(self) -> None:
        """Handle a ready descriptor."""
        sock = self._socket
        if sock is None:
            return
        if not self._connected:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code != errno.ECONNRESET:
                self._settle(code)
                return
            # The connection was made and cut before this thread looked: the process exited, and its port closed a moment later.
        try:
            if self._connected and sock.recv(64):
                return  # no data is expected here: ignore it
        except BlockingIOError:
            return
        except OSError:
            pass
        # Did the process exit, or did only the connection close? If the next attempt is refused, the process exited.
        self.close()
        # Cut twice in a row: strangers crowd the port, which may last. Try again with the next heartbeat.
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
    """Keep a connection to each of these nodes, and to no others."""
    for each in lines.keys() - set(to):
        lines.pop(each).close()
    for each in to:
        if each not in lines:
            lines[each] = _Line(each)


def _poll(lines: Iterable[_Line], wake_fd: int, timeout: float) -> None:
    """Wait until a line is ready or ``wake_fd`` has a byte, for at most ``timeout`` seconds."""
    poller = select.poll()
    poller.register(wake_fd, select.POLLIN)
    by_fd = {line.register(poller): line for line in lines}
    # Opening a line may already have shown that the process has exited.
    until = 0.0 if any(line.ended for line in by_fd.values()) else timeout * 1000 + 1
    for fd, _ in poller.poll(until):
        if fd == wake_fd:
            os.read(wake_fd, 4096)
        else:
            by_fd[fd].hear()


def _lost(neighbour: Neighbour, how: str) -> str:
    on = f" on {neighbour.host}" if neighbour.host else ""
    return f"node {neighbour.rank} is lost: {how.format(on=on)}"
