"""c10d's ``TCPStore`` behind :class:`~rallypoint.rendezvous.store.Store`: a client of our own, without torch.

A supervisor needs torch for nothing but the job's store, and importing torch for c10d's client takes more than
a second and 200 MB. Also, c10d's client waits for answers without limit. The messages are in :mod:`.store_messages`; the
server is torch's (:mod:`.native_store`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

from rallypoint._core import addresses, clock, forks
from rallypoint._core.clock import Deadline
from rallypoint.errors import ProtocolError, RendezvousConnectionError
from rallypoint.rendezvous.store import StoreSilent

from . import store_messages
from .store_messages import Exchange, Reading


# Seconds after which a missing reply (other than to a wait for a key) means that the store is gone.
REPLY_TIMEOUT = 15.0
# Seconds for the first answer on a new connection.
GREETING = 5.0
# The errors by which the kernel reports that nothing has come back.
_NO_ANSWER: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
# ``tcpi_last_ack_recv`` in Linux's ``struct tcp_info``, in milliseconds.
_LAST_ACK: Final = struct.Struct("=56xI")
# The most keys read in one round trip.
CHUNK = 512
# How many bytes to ask for at once, so that a short reply arrives whole.
AHEAD = 4096
# A value that no key ever holds.
NEVER = b"\x00rally: never\x00"
# How often a thread that waits for an answer wakes up (seconds).
TURN = 0.25

T = TypeVar("T")
P = ParamSpec("P")


class LifeSigns:
    """When a store's host last acknowledged anything, as told by broken connections; shared by all connections to it.

    Attributes:
        at: on this host's monotonic clock; None: no connection has found it silent.
    """

    def __init__(self) -> None:
        self.at: float | None = None

    def note(self, sock: socket.socket) -> None:
        """Note a connection that broke because nothing came back."""
        try:
            facts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
        except OSError:
            return
        if len(facts) == _LAST_ACK.size:
            at = clock.MONOTONIC.now() - _LAST_ACK.unpack(facts)[0] / 1000
            self.at = at if self.at is None else max(self.at, at)


class TcpStore:
    """One connection to the store.

    Thread-safe: threads take turns, and another thread may :meth:`close` it meanwhile.

    Args:
        host: the store's host.
        port: the store's port.
        silence: seconds without an answer after which the connection counts as broken, whether the other host's kernel is silent
            or only its process; None waits without limit.
        timeout: seconds that connecting may take; the first answer gets :data:`GREETING` more.
        signs: the host's signs of life; None: none are known.
        begun: called with the socket before it connects, so that another thread can shut the socket down to end the attempt.
        greeted: a connection on which the store has answered the greeting (:func:`.door.enter`); None: a new one is made.

    Raises:
        RendezvousConnectionError: nothing listens there, or no store answered.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        silence: float | None = None,
        timeout: float = REPLY_TIMEOUT,
        signs: LifeSigns | None = None,
        begun: Callable[[socket.socket], None] | None = None,
        greeted: socket.socket | None = None,
    ) -> None:
        self.signs = LifeSigns() if signs is None else signs
        self._host, self._port, self._silence = host.strip("[]"), port, silence
        self._lock = forks.Lock()
        self._closed = False
        self._broken: RendezvousConnectionError | None = None
        self._ahead = b""  # received but not yet read
        deadline = Deadline(timeout)
        try:
            self._socket = greeted or _connected(self._host, port, deadline, begun)
        except OSError as error:
            raise self._gone(error) from None
        forks.abandon_in_child(self)
        self._socket.settimeout(None)
        turn = struct.pack("ll", 0, int(TURN * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, turn)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if silence is not None:
            break_on_silence(self._socket, silence, BREAK)
        if greeted is not None:
            return
        try:
            # Connected does not mean served: the kernel accepts connections for a stopped process, too.
            self._greet((deadline.remaining() or 0.0) + GREETING)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        return self._host

    @property
    def port(self) -> int:
        return self._port

    @property
    def silence(self) -> float | None:
        return self._silence

    def set(self, key: str, value: bytes) -> None:
        self._ask(store_messages.set_value(key, value))

    def get(self, key: str, timeout: float) -> bytes:
        deadline = Deadline(timeout)
        while True:
            if not self._wait([key], deadline):
                raise TimeoutError(f"{key} did not appear within {timeout:.1f} s")
            value = self._ask(store_messages.get(key))
            # The server also wakes waiting clients when another client's compare-and-set of a missing key
            # fails; the value they read then is empty.
            if value or self.exists(key):
                return value

    def get_all(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """As :meth:`get`, for several keys: two round trips for a few hundred, once all exist."""
        deadline, found = Deadline(timeout), []
        for start in range(0, len(keys), CHUNK):
            chunk = keys[start : start + CHUNK]
            if not self._wait(chunk, deadline):
                held = zip(chunk, self.get_many(chunk), strict=True)
                missing = [key for key, value in held if value is None]
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise TimeoutError(
                    f"{(missing or chunk)[0]}{more} did not appear within {timeout:.1f} s"
                )
            values = self._ask(store_messages.get_many(chunk))
            # For an empty value, see get.
            found += [
                value or self.get(key, deadline.remaining() or 0.0)
                for key, value in zip(chunk, values, strict=True)
            ]
        return found

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found: dict[str, bytes | None] = {}
        for start in range(0, len(keys), CHUNK):
            found.update(self._get_chunk(keys[start : start + CHUNK]))
        return [found[key] for key in keys]

    def get_filled(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for start in range(0, len(keys), CHUNK):
            values = self._ask(store_messages.get_many(keys[start : start + CHUNK]))
            found += [value or None for value in values]
        return found

    def _get_chunk(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        values = self._ask(store_messages.get_many(keys))
        found: dict[str, bytes | None] = dict(zip(keys, values, strict=True))
        # The server answers with an empty value both for a missing key and for an empty one.
        empty = [key for key in keys if not found[key]]
        if empty:
            answers = self._ask(store_messages.check_each(empty))
            found.update(dict.fromkeys(empty))
            # A key that exists now may have been set in between, so read its value after the check.
            late = [key for key, is_there in zip(empty, answers, strict=True) if is_there]
            if late:
                values = self._ask(store_messages.get_many(late))
                found.update(zip(late, values, strict=True))
        return found

    def peek(self, key: str) -> bytes | None:
        # One round trip: a compare-and-set whose condition cannot hold returns the current value or, if there is no
        # key, the condition.
        value = self.compare_set(key, NEVER, NEVER)
        return None if value == NEVER else value

    def add(self, key: str, amount: int) -> int:
        return self._ask(store_messages.add(key, amount))

    def add_and_get(
        self, key: str, amount: int, keys: Sequence[str]
    ) -> tuple[int, list[bytes | None]]:
        addition, reading = store_messages.add(key, amount), store_messages.get_many(keys)
        count, values = self._ask(store_messages.both(addition, reading))
        return count, [value or None for value in values]

    def put_new(self, key: str, value: bytes) -> bytes:
        return self.compare_set(key, b"", value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._ask(store_messages.compare_set(key, expected, desired))

    def exists(self, key: str) -> bool:
        return self._ask(store_messages.check([key]))

    def delete(self, key: str) -> bool:
        return self._ask(store_messages.delete(key))

    def clone(self) -> TcpStore:
        if self._closed:
            raise self._is_closed()
        patience = REPLY_TIMEOUT if self._silence is None else max(self._silence, GREETING)
        return TcpStore(
            self._host, self._port, silence=self._silence, timeout=patience, signs=self.signs
        )

    def close(self) -> None:
        """Close the connection. A call that another thread is blocked in fails at once."""
        self._closed = True
        with contextlib.suppress(OSError):  # it is already broken
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._socket.close()

    def abandon(self) -> None:
        """Give the connection up in a forked child: it is the parent's, and must not be shut down here."""
        self._closed = True
        self._lock = forks.Lock()
        self._socket.close()

    def __del__(self) -> None:
        sock = getattr(self, "_socket", None)
        if sock is not None:
            sock.close()

    # -- requests and replies ----------------------------------------------------------------------

    def _greet(self, patience: float) -> None:
        number = os.getpid() & 0xFFFFFFFF
        expected = store_messages.echo(number)

        def answer() -> Reading[bytes]:
            return (yield len(expected))

        def greet() -> None:
            hello = Exchange(store_messages.hello(number), answer)
            if self._exchange(hello, patience) != expected:
                raise ProtocolError("what listens there is not a c10d store")

        self._talk(greet)

    def _ask(self, exchange: Exchange[T]) -> T:
        with self._lock:
            return self._talk(self._exchange, exchange, self._silence)

    def _wait(self, keys: Sequence[str], deadline: Deadline) -> bool:
        """Wait until the keys exist; False when the time is up."""
        with self._lock:
            return self._talk(self._wait_here, keys, deadline)

    def _wait_here(self, keys: Sequence[str], deadline: Deadline) -> bool:
        exchange = store_messages.wait(keys)
        self._send(exchange.request, self._silence)
        # Nothing need come until the time is up. Meanwhile, the kernel notices a silent host.
        if not self._comes_within(deadline.remaining()):
            return self._exchange(store_messages.cancel_wait(), self._silence)
        self._read(exchange.reply(), self._silence)
        return True

    def _talk(self, say: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do one exchange. Any interruption leaves the connection out of step, so it is not used again."""
        if self._closed:
            raise self._is_closed()
        if self._broken is not None:
            raise self._broken
        try:
            return say(*args, **kwargs)
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._closed:
                raise self._is_closed() from None
            self._broken = self._gone(error)
            if isinstance(error, OSError | ProtocolError):
                raise self._broken from None
            raise

    def _exchange(self, exchange: Exchange[T], patience: float | None) -> T:
        if exchange.request:
            self._send(exchange.request, patience)
        return self._read(exchange.reply(), patience)

    def _read(self, reply: Reading[T], patience: float | None) -> T:
        try:
            count = next(reply)
            while True:
                count = reply.send(self._receive(count, patience))
        except StopIteration as done:
            result: T = done.value
            return result

    def _send(self, data: bytes, patience: float | None) -> None:
        rest, turns = memoryview(data), _Turns(patience)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
                turns = _Turns(patience)
            except BlockingIOError:
                turns.another()

    def _receive(self, count: int, patience: float | None) -> bytes:
        turns = None
        while len(self._ahead) < count:
            try:
                more = self._socket.recv(max(AHEAD, count - len(self._ahead)))
            except BlockingIOError:
                turns = turns or _Turns(patience)
                turns.another()
                continue
            if not more:
                raise ConnectionResetError("it has closed the connection")
            self._ahead += more
        data, self._ahead = self._ahead[:count], self._ahead[count:]
        return data

    def _comes_within(self, seconds: float | None) -> bool:
        """Wait until something arrives, even if only the end of the connection. Returns whether it did."""
        if self._ahead:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(None if seconds is None else clock.milliseconds(seconds)))

    # -- what went wrong ---------------------------------------------------------------------------

    def _is_closed(self) -> StoreSilent:
        return StoreSilent(f"the connection to {self._host}:{self._port} is closed")

    def _gone(self, error: BaseException) -> RendezvousConnectionError:
        silent = isinstance(error, TimeoutError) or getattr(error, "errno", None) in _NO_ANSWER
        why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        if silent and (sock := getattr(self, "_socket", None)) is not None:
            self.signs.note(sock)
        kind = StoreSilent if silent else RendezvousConnectionError
        return kind(f"the job's store at {self._host}:{self._port} is gone: {why[:200]}")


def _connected(
    host: str, port: int, deadline: Deadline, begun: Callable[[socket.socket], None] | None
) -> socket.socket:
    """As ``socket.create_connection``, but a concurrent fork need not wait, and the child gets no copy."""
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        addresses.as_asked(host), port, type=socket.SOCK_STREAM
    ):
        with forks.opening():
            sock = forks.close_in_child(socket.socket(family, kind, protocol))
        try:
            if begun is not None:
                begun(sock)
            sock.settimeout((deadline.remaining() or 0.0) + 0.001)
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


class _Turns:
    """Counts how long an answer has been overdue, turn by turn.

    A turn counts with its nominal length, however late this process wakes up: a process that was stopped for a while, or
    starved of CPU, grants the other side the same time (Lifeguard, arXiv:1707.00788).
    """

    __slots__ = ("_left", "_patience")

    def __init__(self, patience: float | None) -> None:
        self._patience = self._left = patience

    def another(self) -> None:
        """Count a turn that is over.

        Raises:
            TimeoutError: it was the last turn.
        """
        if self._left is None:
            return
        self._left -= TURN
        if self._left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {self._patience:.1f} s")


# Linux's limits: seconds between keep-alives, milliseconds without an acknowledgement.
MAX_KEEPALIVE, MAX_TIMEOUT = 32_767, 2**31 - 1
# The part of a silence after which a connection to the job's store breaks. The rest is for a question on a new connection.
BREAK = 0.6


def break_on_silence(sock: socket.socket, seconds: float, part: float = 0.9) -> None:
    """Have the kernel break the connection when the other host falls silent (a cut cable, a lost host).

    With TCP_USER_TIMEOUT (RFC 5482), a call fails when its request stays unacknowledged; with
    keep-alives, so does a call that only waits.

    Args:
        sock: a connected socket.
        seconds: how long a silence is.
        part: the part of the silence after which the connection breaks.
    """
    interval = min(max(1, int(seconds / 4)), MAX_KEEPALIVE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(seconds * 1000 * part), MAX_TIMEOUT)
    )
