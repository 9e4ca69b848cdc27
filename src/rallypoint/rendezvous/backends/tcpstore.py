"""c10d's ``TCPStore`` behind :class:`~rallypoint.rendezvous.store.Store`: served by one node, used by all.

The one module of this package that imports torch, and only when a job has several nodes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from rallypoint._core import addresses, env as environment, forks, resolver
from rallypoint._core.clock import MONOTONIC, Deadline
from rallypoint.errors import RendezvousConnectionError
from rallypoint.rendezvous.store import StoreSilent


# A reply of the store itself (not a wait for a key) that takes longer means that it is gone.
REPLY_TIMEOUT = 15.0
# The time that c10d's client gets for its first attempt at another connection.
FIRST_PATIENCE = 0.5
# Seconds for the first answer on a new connection.
GREETING = 5.0
# How the kernel says that nothing has come back.
NO_ANSWER = tuple(
    os.strerror(code) for code in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
)
# Keys read in one round trip.
CHUNK = 512
# No key ever holds this.
NEVER = b"\x00rally: never\x00"
# While an answer is due the watchdog looks this often (seconds).
WATCH_EVERY = 0.25


class TcpStore:
    """One connection to the store; the serving node's first one owns the server.

    Args:
        host: where it is served; with a listener, there.
        port: its port.
        listener: on the serving node, the bound socket; the store takes it over.
        silence: seconds without an answer after which the connection counts as broken, whether the
            other host's kernel is silent or only its process; None waits without limit.
        connect_timeout: seconds that the other side may take to accept us.
    """

    def __init__(
        self,
        host: str,
        port: int,
        listener: socket.socket | None = None,
        silence: float | None = None,
        connect_timeout: float | None = None,
    ) -> None:
        serving = listener is not None
        if listener is not None:
            host = addresses.reached_at(listener)
        self._host, self._port, self._silence = host, port, silence
        self._socket: socket.socket | None = None
        timeout = timedelta(seconds=REPLY_TIMEOUT if connect_timeout is None else connect_timeout)
        # Who serves must not wait for those of this process that wait to be served.
        turn = contextlib.nullcontext() if serving else _connecting
        address = host if serving else resolver.numeric(host, port)
        tcp_store = _import_tcp_store()
        with (
            turn,
            _as_connection_error(host, port, connecting=True),
            resolver.without_name_servers(),
        ):
            sockets = _NewSockets(all_of_them=serving)
            # Connected is not served: c10d waits for the first answer without limit.
            patience = timeout.total_seconds() + GREETING
            watch = _watchdog.expect(partial(_break_off_new, sockets, port), patience)
            try:
                self._store: Any = tcp_store(
                    address,
                    port,
                    None,
                    is_master=serving,
                    timeout=timeout,
                    wait_for_workers=False,
                    master_listen_fd=None if listener is None else listener.detach(),
                )
            finally:
                _watchdog.done(watch)
            self._store.set_timeout(timedelta(seconds=REPLY_TIMEOUT))
            self._socket = sockets.to(port)
            if silence is not None:
                _break_on_silence(self._socket, silence)
        forks.abandon_in_child(self)
        forks.call_in_child(_renew)

    @contextmanager
    def _asking(self, wait: float = 0.0) -> Iterator[Any]:
        """c10d's store for one call, which the watchdog breaks off if the answer is overdue."""
        store = self._store
        if store is None:
            raise self._closed()
        sock, silence = self._socket, self._silence
        if sock is None or silence is None:
            with _as_connection_error(self._host, self._port):
                yield store
            return
        began = MONOTONIC.now()
        watch = _watchdog.expect(partial(sock.shutdown, socket.SHUT_RDWR), wait + silence)
        try:
            with _as_connection_error(self._host, self._port):
                yield store
        except RendezvousConnectionError as error:
            # Broken by the watchdog, by the kernel, or closed here; a server that hangs up does so at once.
            late = MONOTONIC.now() - began > silence / 2
            if late or self._store is None or any(word in str(error) for word in NO_ANSWER):
                raise StoreSilent(str(error)) from None
            raise
        finally:
            _watchdog.done(watch)

    def _closed(self) -> StoreSilent:
        return StoreSilent(f"the connection to {self._host}:{self._port} is closed")

    @property
    def port(self) -> int:
        return self._port

    def set(self, key: str, value: bytes) -> None:
        with self._asking() as store:
            store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        with self._asking(timeout) as store:
            deadline = Deadline(timeout)
            try:
                while True:
                    # One call that waits and reads is one round trip less than a wait and a read.
                    left = deadline.remaining() or 0.0
                    store.set_timeout(timedelta(seconds=max(left, 0.001)))
                    value = bytes(store.get(key))
                    # The server also wakes those who wait when another's compare-and-set of a key that is
                    # not there fails; what they read then is nothing.
                    if value or store.check([key]):
                        return value
            finally:
                store.set_timeout(timedelta(seconds=REPLY_TIMEOUT))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for start in range(0, len(keys), CHUNK):
            with self._asking() as store:
                found += _get_chunk(store, list(keys[start : start + CHUNK]))
        return found

    def peek(self, key: str) -> bytes | None:
        # c10d's own reads ask first whether the key is there. A compare-and-set whose condition cannot hold
        # answers at once with what is there; where there is no key, with the condition.
        with self._asking() as store:
            value = bytes(store.compare_set(key, NEVER, NEVER))
        return None if value == NEVER else value

    def add(self, key: str, amount: int) -> int:
        with self._asking() as store:
            return int(store.add(key, amount))

    def put_new(self, key: str, value: bytes) -> bytes:
        with self._asking() as store:
            return bytes(store.compare_set(key, "", value))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._asking() as store:
            return bytes(store.compare_set(key, expected, desired))

    def exists(self, key: str) -> bool:
        with self._asking() as store:
            return bool(store.check([key]))

    def delete(self, key: str) -> bool:
        with self._asking() as store:
            return bool(store.delete_key(key))

    def clone(self) -> TcpStore:
        if self._store is None:
            raise self._closed()
        patience = REPLY_TIMEOUT if self._silence is None else max(self._silence, GREETING)
        return connect(self._host, self._port, silence=self._silence, timeout=patience, probe=False)

    def native(self, timeout: float) -> Any:
        """c10d's own client over a connection of its own, for c10d's own users.

        The kernel breaks it when the other host falls silent; nobody looks after a process that stands still.

        Args:
            timeout: seconds that its ``get`` and ``wait`` wait for a key.
        """
        return self.clone().release(timeout)

    def release(self, timeout: float) -> Any:
        """c10d's client, with that timeout, which is not ours any more: closing this object does not end it."""
        native, self._store = self._store, None
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()  # only our own descriptor of it
        native.set_timeout(timedelta(seconds=timeout))
        return native

    def close(self) -> None:
        """Give the connection back; the serving node's first one ends the server with it.

        A call of another thread that is blocked in this connection fails at once.
        """
        self._store = None
        sock, self._socket = self._socket, None
        if sock is not None:
            with contextlib.suppress(OSError):  # broken already
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's, and must not be shut down here."""
        self._store = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        sock = getattr(self, "_socket", None)
        if sock is not None:
            sock.close()  # the connection itself ends with c10d's client


def connect(
    host: str,
    port: int,
    *,
    silence: float | None,
    timeout: float = REPLY_TIMEOUT,
    probe: bool = True,
    patience: float = FIRST_PATIENCE,
) -> TcpStore:
    """A connection to a store that somebody serves, within ``timeout`` seconds.

    c10d's client tries a place that refuses it again and again, for all of its timeout, while others of
    this process wait for their turn. So it gets little time at first, and a place that refuses none.

    Args:
        patience: seconds for the first attempt; each further one gets twice as long.
        probe: ask first; else only before a second try. Thousands of nodes that come at once overflow the queue of
            the server's kernel, and each that asks first comes twice.

    Raises:
        RendezvousConnectionError: nobody serves there, or no answer came.
    """
    deadline = Deadline(timeout)
    while True:
        left = deadline.remaining() or 0.001
        try:
            if probe:
                socket.create_connection((host.strip("[]"), port), timeout=left).close()
        except OSError as error:
            raise _gone(host, port, error) from None
        probe = True
        try:
            name = host.strip("[]")
            return TcpStore(name, port, silence=silence, connect_timeout=min(patience, left))
        except RendezvousConnectionError:
            if deadline.expired():
                raise
        patience *= 2


# Two threads that each put a variable back would leave one of them changed.
_loading = forks.Lock()


def load() -> None:
    """Import torch, so that no deadline has to pay for it."""
    _import_tcp_store()


def _import_tcp_store() -> Any:
    # c10d warns in C++ of each wait that ends without its key, and prints its stack where a connection
    # fails; we say what is the matter ourselves.
    level = environment.get("TORCH_CPP_LOG_LEVEL", "FATAL")
    # It reads the variable once, when it is loaded: that must be here.
    with _loading, environment.overlay({"TORCH_CPP_LOG_LEVEL": level}):
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it by *
    return TCPStore


def _get_chunk(store: Any, keys: list[str]) -> list[bytes | None]:
    # c10d reads many keys at once only where all exist; else halves are tried. (To peek at one key wakes all
    # who wait for it.)
    if store.check(keys):
        return [bytes(value) for value in store.multi_get(keys)]
    if len(keys) == 1:
        return [None]
    half = len(keys) // 2
    return _get_chunk(store, keys[:half]) + _get_chunk(store, keys[half:])


# -- connections that fall silent -----------------------------------------------------------------
# c10d's calls wait for an answer without limit, and it offers no way to set one; but the sockets it opens
# are this process's own. They are found as the descriptors that are new after a connection was made.

# One connection is made at a time, so that new descriptors can be told apart.
_connecting = forks.Lock()


class _NewSockets:
    """The descriptors that this process opens from now on.

    Args:
        all_of_them: look at every descriptor; else only at the lowest free one, which is next.
    """

    def __init__(self, *, all_of_them: bool) -> None:
        self._before = _descriptors() if all_of_them else None
        self._next = -1 if all_of_them else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if self._next >= 0:
            os.close(self._next)

    def to(self, port: int) -> socket.socket | None:
        """The new connection to ``port``, as a descriptor of its own; None if it cannot be told."""
        # Other threads may have opened something in between: then ours is one of the next, or anywhere.
        if self._next >= 0:
            for fd in range(self._next, self._next + NEARBY):
                found = _unclaimed_connection(fd, port)
                if found is not None:
                    return found
        fresh = _descriptors() - (self._before or set())
        for fd, inode in sorted(fresh, reverse=True):
            found = None if inode in _claimed else _unclaimed_connection(fd, port)
            if found is not None:
                return found
        return None


def _break_off_new(sockets: _NewSockets, port: int) -> None:
    if (sock := sockets.to(port)) is not None:
        with sock:
            sock.shutdown(socket.SHUT_RDWR)


# Descriptors from the expected one on that are looked at before all others.
NEARBY = 16
# Inodes of connections that have been told: each belongs to one store. The kernel does not use them again.
_claimed: set[int] = set()


def _unclaimed_connection(fd: int, port: int) -> socket.socket | None:
    found = _connection_to(fd, port)
    if found is None:
        return None
    inode = os.fstat(found.fileno()).st_ino
    if inode in _claimed:
        found.close()
        return None
    _claimed.add(inode)
    return found


def _descriptors() -> set[tuple[int, int]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.fstat(int(name)).st_ino))
        except OSError:
            continue  # the descriptor of this very listing
    return found


def _connection_to(fd: int, port: int) -> socket.socket | None:
    try:
        own = os.dup(fd)
    except OSError:
        return None  # closed again
    try:
        sock = socket.socket(fileno=own)
    except OSError:
        os.close(own)  # no socket
        return None
    try:
        # Other threads open sockets of other kinds, whose peers are no pair of host and port.
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[1] == port:
            return sock
    except OSError:
        pass  # a listener
    sock.close()
    return None


def _break_on_silence(sock: socket.socket | None, seconds: float) -> None:
    """Have the kernel break the connection when the other host falls silent (a cut cable, a lost host).

    With TCP_USER_TIMEOUT (RFC 5482) a call in progress fails when its request stays unacknowledged, with
    keep-alives also one that only waits.
    """
    if sock is None:
        return
    interval = max(1, int(seconds / 4))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 900))


BreakOff = Callable[[], None]


class _Watchdog:
    """Breaks connections whose answer is overdue: a process that stands still keeps its kernel answering.

    An answer may be late because this very process is: stopped for a while, or starved of the processor. Then
    the watchdog's own turn is late, too, and as much is granted to all (Lifeguard, arXiv:1707.00788).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected: dict[int, tuple[float, BreakOff]] = {}
        self._ids = itertools.count()
        self._thread: threading.Thread | None = None
        self._idle = False

    def expect(self, break_off: BreakOff, seconds: float) -> int:
        """An answer is due within ``seconds``; else ``break_off`` is called."""
        number = next(self._ids)
        with self._changed:
            self._expected[number] = (MONOTONIC.now() + seconds, break_off)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="rally-watchdog", daemon=True
                )
                self._thread.start()
            elif self._idle:
                self._changed.notify()
        return number

    def done(self, number: int) -> None:
        with self._changed:
            self._expected.pop(number, None)

    def _run(self) -> None:
        turn = math.inf
        while True:
            with self._changed:
                now = MONOTONIC.now()
                late = now - turn
                if late > WATCH_EVERY:
                    for number, (due, break_off) in self._expected.items():
                        self._expected[number] = (due + late, break_off)
                overdue = [n for n, (due, _) in self._expected.items() if due <= now]
                for number in overdue:
                    _, break_off = self._expected.pop(number)
                    with contextlib.suppress(OSError):  # it is broken already
                        break_off()
                # Most answers come at once: looking now and then is cheaper than being woken for each.
                self._idle = not self._expected
                turn = math.inf if self._idle else now + WATCH_EVERY
                self._changed.wait(None if self._idle else WATCH_EVERY)


_watchdog = _Watchdog()


def _renew() -> None:
    """In a forked child, which lacks its thread."""
    global _watchdog  # noqa: PLW0603  # of this process
    _watchdog = _Watchdog()


@contextmanager
def _as_connection_error(host: str, port: int, *, connecting: bool = False) -> Iterator[None]:
    from torch.distributed import DistError, DistStoreError

    try:
        yield
    except DistStoreError as error:
        # c10d says "wait timeout" for a key that does not come, and the same type for the rest.
        if "timeout" in str(error).lower() and not connecting:
            raise TimeoutError(str(error).splitlines()[0]) from None
        raise _gone(host, port, error) from None
    except (DistError, RuntimeError) as error:
        raise _gone(host, port, error) from None


def _gone(host: str, port: int, error: Exception) -> RendezvousConnectionError:
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return RendezvousConnectionError(f"the job's store at {host}:{port} is gone: {why[:200]}")
