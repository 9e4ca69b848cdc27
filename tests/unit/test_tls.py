"""TLS around a socket: nothing is lost, doubled or left behind; damaged or foreign data is reported in a few words.

How lines behave over it is tested with all lines, in test_line.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import tls_ends
from pace import pace
from rallypoint._core.clock import Deadline
from rallypoint.errors import AuthenticationError, ConfigError, DeadlineExceeded, ProtocolError
from rallypoint.rpc import NativeRpcBackendOptions, Tls
from rallypoint.rpc.certificates import identity_of
from rallypoint.rpc.connections.handshake import Introduced, Welcome, introduce
from rallypoint.rpc.tensorpipe import TensorPipe
from rallypoint.wire.auth import Accepting, Connecting
from rallypoint.wire.frames import Frame, FrameParser, encode
from rallypoint.wire.line import Closed
from rallypoint.wire.tls import Connection, Identity, TlsLine, TlsSocket


SECRET = b"the job's own secret"
A = {"job": "x", "generation": 0, "name": "a", "id": 0}
B = {"job": "x", "generation": 0, "name": "b", "id": 1}
DONT_WAIT = socket.MSG_DONTWAIT


@pytest.fixture(autouse=True)
def _descriptors_are_returned() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The underlying sockets, whose bytes are not encrypted."""
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@pytest.fixture
def ends(raw: tuple[socket.socket, socket.socket]) -> tuple[TlsSocket, TlsSocket]:
    return tls_ends.pair(*raw)


def received(end: TlsSocket, least: int = 1) -> bytes:
    """At least that many bytes."""
    found = b""
    until = time.monotonic() + 10.0
    while len(found) < least:
        with contextlib.suppress(BlockingIOError):
            found += end.recv(0)
        assert time.monotonic() < until, f"only {len(found)} of {least} bytes came"
    return found


# -- sending: what the kernel takes, and what it does not --------------------------------------------


class Kernel:
    """A socket for which a test says how much it takes on each call."""

    def __init__(self) -> None:
        self.takes: deque[int] = deque()
        self.came = bytearray()
        self.other: Kernel
        self.calls = 0

    def send(self, data: memoryview, flags: int = 0) -> int:
        del flags
        self.calls += 1
        count = min(len(data), self.takes.popleft() if self.takes else len(data))
        if not count:
            raise BlockingIOError
        self.other.came += data[:count]
        return count

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0) -> int:
        del size, flags
        if not self.came:
            raise BlockingIOError
        count = min(len(buffer), len(self.came))
        buffer[:count] = self.came[:count]
        del self.came[:count]
        return count

    def setblocking(self, flag: bool) -> None: ...

    def shutdown(self, how: int) -> None: ...


def over_kernels() -> tuple[TlsSocket, TlsSocket, Kernel]:
    here, there = Kernel(), Kernel()
    here.other, there.other = there, here
    ours, theirs = tls_ends.pair(here, there)  # type: ignore[arg-type]
    return ours, theirs, here


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """The same bytes in pieces."""
    places = [0, *sorted(each % (len(data) + 1) for each in at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


@settings(max_examples=60)
@given(
    size=st.integers(0, 200_000),
    cuts=st.lists(st.lists(st.integers(0, 200_000), max_size=6), min_size=1, max_size=5),
    takes=st.lists(st.integers(0, 90_000) | st.integers(0, 40), max_size=25),
    seed=st.integers(0, 1000),
)
def test_each_byte_arrives_once_however_little_the_kernel_takes(
    size: int, cuts: list[list[int]], takes: list[int], seed: int
) -> None:
    ours, theirs, kernel = over_kernels()
    data = random.Random(seed).randbytes(size)
    kernel.takes.extend(takes)
    counted, turn, found = 0, 0, b""
    while counted < size:
        # What did not count is offered again, in other pieces, followed by more or less.
        pieces = cut(data[counted:], cuts[turn % len(cuts)])
        turn += 1
        try:
            counted += ours.sendmsg(pieces, (), DONT_WAIT)
        except BlockingIOError:
            assert kernel.calls
        with contextlib.suppress(BlockingIOError):
            while True:
                found += theirs.recv(0)
        # What counts as sent is completely with the kernel: it can be read.
        assert len(found) >= counted
    assert found == data


def test_what_the_kernel_has_not_taken_in_full_does_not_count() -> None:
    ours, theirs, kernel = over_kernels()
    kernel.takes.extend([10, 0])
    with pytest.raises(BlockingIOError):
        ours.send(b"a message", DONT_WAIT)
    kernel.takes.extend([3, 0])
    with pytest.raises(BlockingIOError):
        ours.send(b"a message", DONT_WAIT)
    with pytest.raises(BlockingIOError):
        theirs.recv(0)
    assert ours.send(b"a message and more", DONT_WAIT) == len(b"a message and more")
    assert received(theirs) == b"a message and more"


def test_nothing_is_sent_of_nothing() -> None:
    ours, _, kernel = over_kernels()
    calls = kernel.calls
    assert ours.send(b"") == 0
    assert ours.sendmsg([b"", memoryview(b"")]) == 0
    assert kernel.calls == calls


def test_small_pieces_share_a_record_and_large_ones_go_in_few_calls() -> None:
    ours, theirs, kernel = over_kernels()
    calls = kernel.calls
    assert ours.sendmsg([b"x"] * 1000) == 1000
    assert kernel.calls == calls + 1
    assert len(kernel.other.came) < 1100
    assert received(theirs) == b"x" * 1000
    data = os.urandom(1 << 20)
    assert ours.sendmsg([b"head", data]) == len(data) + 4
    assert kernel.calls <= calls + 20
    assert received(theirs, len(data) + 4) == b"head" + data


def test_nothing_of_it_can_be_read_on_the_way() -> None:
    ours, _, kernel = over_kernels()
    ours.send(b"a marker that is easily found" * 100)
    assert b"marker" not in kernel.other.came


# -- lines over slow sockets -------------------------------------------------------------------------


class Lines:
    def __init__(self, send_buffer: int) -> None:
        a, b = socket.socketpair()
        for each in (a, b):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        one, two = tls_ends.pair(a, b)
        self.a, self.b = TlsLine(one, FrameParser(), "a"), TlsLine(two, FrameParser(), "b")


@pytest.fixture
def slow() -> Iterator[Lines]:
    """Lines whose sockets take a few KiB at a time."""
    made = Lines(2048)
    yield made
    for each in (made.a, made.b):
        each.shut()
        each.close()


def test_large_frames_in_both_directions_at_once_from_many_threads(slow: Lines) -> None:
    threads_each, frames_each = 3, 12
    failures: list[BaseException] = []
    found: dict[str, list[Frame]] = {"a": [], "b": []}

    def data(sender: int, number: int) -> bytes:
        return random.Random(sender * 100 + number).randbytes(
            [50, 3_000, 80_000, 200_000][number % 4]
        )

    def send(line: TlsLine, sender: int) -> None:
        try:
            for number in range(frames_each):
                content = data(sender, number)
                line.send(encode(1 + sender, number, content[:40], [memoryview(content)]))
                if number % 4 == 3:
                    line.push(Deadline(20.0))
            line.push(Deadline(20.0))
        except BaseException as error:
            failures.append(error)

    def receive(line: TlsLine) -> None:
        try:
            until = time.monotonic() + 20.0
            while len(found[line.kind]) < threads_each * frames_each and time.monotonic() < until:
                found[line.kind] += line.read(0.2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=receive, args=(line,)) for line in (slow.a, slow.b)]
    threads += [
        threading.Thread(target=send, args=(line, sender))
        for line in (slow.a, slow.b)
        for sender in range(threads_each)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failures == []
    for frames in found.values():
        assert len(frames) == threads_each * frames_each
        for frame in frames:
            assert bytes(frame.buffers[0]) == data(frame.kind - 1, frame.call)
        for sender in range(threads_each):
            mine = [each.call for each in frames if each.kind == 1 + sender]
            assert mine == list(range(frames_each))


class Alone:
    """OpenSSL's object, or a BIO, that records when two threads use it at once."""

    def __init__(self, inner: Any, busy: threading.Lock, clashes: list[str]) -> None:
        self._inner, self._busy, self._clashes = inner, busy, clashes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._use, name, found) if callable(found) else found

    def _use(self, name: str, act: Callable[..., Any], *args: Any) -> Any:
        if not self._busy.acquire(False):
            self._clashes.append(name)
            return act(*args)
        try:
            time.sleep(0.0001)  # let others run
            return act(*args)
        finally:
            self._busy.release()


def test_one_thread_at_a_time_uses_openssl(slow: Lines) -> None:
    clashes: list[str] = []
    for line in (slow.a, slow.b):
        busy = threading.Lock()
        for name in ("_tls", "_incoming", "_outgoing"):
            setattr(line._sock, name, Alone(getattr(line._sock, name), busy, clashes))

    def use(line: TlsLine) -> None:
        for number in range(20):
            line.send(encode(1, number, bytes(20_000)))
            line.push(Deadline(10.0))

    senders = [threading.Thread(target=use, args=(line,)) for line in (slow.a, slow.b)]
    counts = {"a": 0, "b": 0}

    def receive(line: TlsLine) -> None:
        while counts[line.kind] < 20:
            counts[line.kind] += len(line.read(5.0))

    receivers = [threading.Thread(target=receive, args=(line,)) for line in (slow.a, slow.b)]
    for each in senders + receivers:
        each.start()
    for each in senders + receivers:
        each.join(20.0)
    assert counts == {"a": 20, "b": 20}
    assert clashes == []


def test_a_line_is_full_until_the_kernel_has_the_last_record(slow: Lines) -> None:
    # Shorter than a chunk: all of it is encrypted at once, but far from sent.
    content = os.urandom(30_000)
    assert not slow.a.send(encode(1, 1, content))
    assert slow.a.is_full
    found: list[Frame] = []
    while slow.a.is_full:
        assert slow.a.bytes_sent == 0
        assert found == []
        found += slow.b.read_now()
        slow.a.flush()
    while not found:
        found += slow.b.read(1.0)
    assert found[0].payload == content


def test_nothing_that_is_decrypted_stays_behind(slow: Lines) -> None:
    made = Lines(1 << 20)
    # More than a parser's own memory, in many records and frames: the descriptor no longer signals any of it.
    sizes = [1, 100, 70_000, 5, 20_000, 1]
    for number, size in enumerate(sizes):
        made.a.send(encode(1, number, bytes(size), [memoryview(bytes(size))]))
    assert not made.a.is_full
    found: list[Frame] = []
    while select.select([made.b], [], [], 0.0)[0]:
        found += made.b.read_now()
    assert [len(each.payload) for each in found] == sizes
    for each in (made.a, made.b):
        each.close()


# -- the end, and damage -----------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["garbage", "a flipped bit", "cut off", "a record twice"])
def test_damage_ends_the_line_after_what_came_before_it(
    raw: tuple[socket.socket, socket.socket], damage: str
) -> None:
    ours, theirs = tls_ends.pair(*raw)
    line = TlsLine(theirs, FrameParser())
    a, b = raw
    ours.sendmsg(encode(1, 1, b"whole"))
    whole = b.recv(9000, socket.MSG_DONTWAIT)
    ours.sendmsg(encode(1, 2, b"damaged"))
    record = bytearray(b.recv(9000, socket.MSG_DONTWAIT))
    match damage:
        case "garbage":
            record = bytearray(os.urandom(500))
        case "a flipped bit":
            record[20] ^= 1
        case "cut off":
            del record[-3:]
        case _:
            record = bytearray(whole)
    a.send(whole + record)
    if damage == "cut off":
        a.shutdown(socket.SHUT_WR)
    (frame,) = line.read(5.0)
    assert frame.payload == b"whole"
    assert select.select([line], [], [], 1.0)[0], "the descriptor must ask to be read"
    with pytest.raises(
        Closed, match=r"^the connection broke: TLS: [a-z ]+$|^the other end has closed"
    ):
        line.read(5.0)


def test_an_end_is_told_with_a_farewell_and_without(
    raw: tuple[socket.socket, socket.socket],
) -> None:
    for polite in (True, False):
        a, b = socket.socketpair()
        ours, theirs = tls_ends.pair(a, b)
        line = TlsLine(theirs, FrameParser())
        if polite:
            with contextlib.suppress(ssl.SSLWantReadError):
                ours._tls.unwrap()
            a.send(ours._outgoing.read())
        else:
            a.close()
        with pytest.raises(Closed, match=r"^the other end has closed the connection$"):
            while True:
                line.read(2.0)
        a.close()
        line.close()


# -- the handshake -----------------------------------------------------------------------------------


def test_both_ends_know_the_same_of_the_channel_and_it_is_the_accepting_ends(
    ends: tuple[TlsSocket, TlsSocket],
) -> None:
    ours, theirs = ends
    assert ours.channel == theirs.channel == tls_ends.an_identity().fingerprint
    other = identity_of(True)
    assert other is not None
    assert other.fingerprint != ours.channel
    assert ours._tls.version() == "TLSv1.3"


def test_older_versions_are_refused(raw: tuple[socket.socket, socket.socket]) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    mine = tls_ends.an_identity()
    ours = TlsSocket(raw[0], Identity(mine.accepting, old, b""), accepts=False)
    theirs = TlsSocket(raw[1], mine, accepts=True)
    with pytest.raises(ProtocolError, match=r"unsupported protocol"):
        tls_ends.shake(ours, theirs)


def test_a_handshake_that_comes_byte_by_byte(raw: tuple[socket.socket, socket.socket]) -> None:
    a, b = raw
    between_a, between_b = socket.socketpair()
    ours = TlsSocket(a, tls_ends.an_identity(), accepts=False)
    theirs = TlsSocket(between_b, tls_ends.an_identity(), accepts=True)
    for each in (ours, theirs, b, between_a):
        each.setblocking(False)
    until = time.monotonic() + 10.0
    while not (ours.is_open and theirs.is_open):
        assert time.monotonic() < until
        for end in (ours, theirs):
            with contextlib.suppress(BlockingIOError):
                end.is_open or end.step()
        for source, target in ((b, between_a), (between_a, b)):
            with contextlib.suppress(BlockingIOError):
                target.send(source.recv(1))
    assert ours.channel == theirs.channel
    between_a.close()
    between_b.close()


class Host:
    """The accepting side, as the poller would drive it."""

    def __init__(self, sock: socket.socket, identity: Identity | None) -> None:
        self.reasons: list[str] = []
        self.peer: dict[str, Any] | None = None
        self.rest = b""
        self.sock: Connection | None = None
        self.longest = 0.0
        self.welcome = Welcome(
            sock,
            SECRET,
            B,
            takes_side=False,
            identity=identity,
            accepted=self._accepted,
            ended=lambda _, reason: self.reasons.append(reason),
        )

    def _accepted(self, sock: Connection, known: Introduced, *_: object) -> None:
        self.sock, self.peer, self.rest = sock, known.peer, known.rest

    def serve(self) -> None:
        until = time.monotonic() + 5.0
        while not self.reasons and time.monotonic() < until:
            if select.select([self.welcome.sock], [], [], 0.05)[0]:
                began = time.monotonic()
                self.welcome.on_ready(select.EPOLLIN, deque())
                self.longest = max(self.longest, time.monotonic() - began)


@contextlib.contextmanager
def hosting(sock: socket.socket, identity: Identity | None) -> Iterator[Host]:
    host = Host(sock, identity)
    thread = threading.Thread(target=host.serve)
    thread.start()
    try:
        yield host
    finally:
        thread.join()
        sock.close()


def connecting(sock: socket.socket, identity: Identity | None = None) -> TlsSocket:
    return TlsSocket(sock, identity or tls_ends.an_identity(), accepts=False)


def test_the_proofs_go_through_tls(raw: tuple[socket.socket, socket.socket]) -> None:
    ours = connecting(raw[0])
    with hosting(raw[1], tls_ends.an_identity()) as host:
        peer, rest, side, _ = introduce(ours, SECRET, A, Deadline(5.0), side=False)
        assert (peer, rest, side) == (B, b"", None)
        while host.sock is None:
            time.sleep(0.001)
        assert host.peer == A
        assert host.reasons == [""]
        assert isinstance(host.sock, TlsSocket)
        host.sock.send(b"after")
        assert received(ours) == b"after"


def test_what_comes_with_the_last_proof_is_handed_on(
    raw: tuple[socket.socket, socket.socket],
) -> None:
    # One piece for the kernel, but separate records for OpenSSL: nothing may stay behind.
    ours = connecting(raw[0])
    host = Host(raw[1], tls_ends.an_identity())
    theirs = host.welcome.sock
    talk = Connecting(SECRET, A, b"n" * 32, host.welcome._tls._own)  # type: ignore[union-attr]
    ours.setblocking(False)
    while not ours.is_open:
        with contextlib.suppress(BlockingIOError):
            ours.step()
        host.welcome.on_ready(select.EPOLLIN, deque())
    ours.send(talk.start())
    host.welcome.on_ready(select.EPOLLIN, deque())
    proof = talk.receive(received(ours))
    ours.sendmsg([proof])
    ours.send(b"first")
    ours.send(b"second" * 5000)
    while not host.reasons:
        host.welcome.on_ready(select.EPOLLIN, deque())
    assert host.peer == A
    assert host.rest == b"first" + b"second" * 5000
    assert theirs is host.sock


def test_a_hello_that_comes_with_the_end_of_the_handshake_is_answered(
    raw: tuple[socket.socket, socket.socket],
) -> None:
    # By then OpenSSL holds it, and the descriptor does not signal it.
    ours = connecting(raw[0])
    host = Host(raw[1], tls_ends.an_identity())
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        ours.step()
    host.welcome.on_ready(select.EPOLLIN, deque())
    assert ours.step()
    talk = Connecting(SECRET, A, b"n" * 32, ours.channel)
    ours.send(talk.start())
    host.welcome.on_ready(select.EPOLLIN, deque())
    assert not select.select([host.welcome.sock], [], [], 0.0)[0]
    assert b'"role":"accepting"' in received(ours)
    host.welcome.close("the test is over")


def test_a_plain_worker_and_one_with_tls_tell_each_other() -> None:
    for ours_plain in (True, False):
        a, b = socket.socketpair()
        sock: Connection = a if ours_plain else connecting(a)
        with hosting(b, tls_ends.an_identity() if ours_plain else None) as host:
            with pytest.raises((ProtocolError, ConnectionError)) as caught:
                introduce(sock, SECRET, A, Deadline(5.0), side=False)
            a.close()
        if ours_plain:
            assert (
                "does not use TLS, which this worker requires: give all workers the same tls"
                in (host.reasons[0])
            )
        else:
            assert "the connecting process uses TLS, but this worker does not" in host.reasons[0]
            assert "does not use TLS: give all workers the same tls=" in str(caught.value)


@pytest.mark.parametrize("seed", range(12))
def test_garbage_costs_its_own_connection(
    raw: tuple[socket.socket, socket.socket], seed: int
) -> None:
    chance = random.Random(seed)
    hello = bytearray(_client_hello())
    match seed % 4:
        case 0:
            data = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * chance.randrange(1, 500)
        case 1:
            data = chance.randbytes(chance.randrange(8, 30_000))
        case 2:
            hello[chance.randrange(60)] ^= 1 << chance.randrange(8)
            data = bytes(hello)
        case _:
            data = bytes(hello[: chance.randrange(1, len(hello))])
    with hosting(raw[1], tls_ends.an_identity()) as host:
        raw[0].sendall(data)
        raw[0].shutdown(socket.SHUT_WR)
    assert len(host.reasons) == 1
    assert host.reasons[0].isprintable()
    assert host.reasons[0]
    assert host.peer is None


def _client_hello() -> bytes:
    out = ssl.MemoryBIO()
    end = tls_ends.an_identity().connecting.wrap_bio(ssl.MemoryBIO(), out)
    with contextlib.suppress(ssl.SSLWantReadError):
        end.do_handshake()
    return out.read()


def test_half_a_handshake_holds_nobody_up(raw: tuple[socket.socket, socket.socket]) -> None:
    host = Host(raw[1], tls_ends.an_identity())
    raw[0].send(_client_hello()[:50])
    began = time.monotonic()
    for _ in range(3):
        host.welcome.on_ready(select.EPOLLIN, deque())
    assert time.monotonic() - began < 0.5 * pace()
    assert host.reasons == []
    assert 5.0 < host.welcome.until - time.monotonic() < 15.0
    host.welcome.close("it has not proved itself in time")
    assert host.welcome.sock.fileno() == -1


def test_one_that_never_answers_is_given_up_in_time(
    raw: tuple[socket.socket, socket.socket],
) -> None:
    for seconds in (0.0, 0.2):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"TLS handshake in time"):
            introduce(connecting(raw[0]), SECRET, A, Deadline(seconds), side=False)
        assert seconds <= time.monotonic() - began < 2.0 * pace()


def test_one_that_answers_ever_so_slowly_is_given_up_in_time(
    raw: tuple[socket.socket, socket.socket],
) -> None:
    stopped = threading.Event()

    def drip() -> None:
        # The head of a long record, followed by its bytes.
        with contextlib.suppress(OSError):
            raw[1].send(b"\x16\x03\x03\x20\x00")
            while not stopped.wait(0.05):
                raw[1].send(b"\x02")

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    with pytest.raises((DeadlineExceeded, ProtocolError)):
        introduce(connecting(raw[0]), SECRET, A, Deadline(0.4), side=False)
    assert time.monotonic() - began < 2.0 * pace()
    stopped.set()
    thread.join()


def relay(client: socket.socket, server: socket.socket) -> None:
    """A man in the middle with a certificate of his own, who forwards everything that is said within TLS."""
    own = identity_of(True)
    assert own is not None
    to_client = TlsSocket(client, own, accepts=True)
    to_server = TlsSocket(server, own, accepts=False)
    until = time.monotonic() + 5.0
    for each in (to_client, to_server):
        each.setblocking(False)
    while time.monotonic() < until:
        for source, target in ((to_client, to_server), (to_server, to_client)):
            try:
                if not (source.is_open or source.step()) or not target.is_open:
                    continue
                data = source.recv(0)
            except BlockingIOError:
                continue
            except (OSError, ProtocolError):
                data = b""
            if not data:
                to_client.close()
                to_server.close()
                return
            target.send(data)


def test_one_in_the_middle_is_not_believed_though_he_relays_the_proofs(
    raw: tuple[socket.socket, socket.socket],
) -> None:
    far_a, far_b = socket.socketpair()
    between = threading.Thread(target=relay, args=(raw[1], far_a))
    between.start()
    with hosting(far_b, tls_ends.an_identity()) as host:
        with pytest.raises(AuthenticationError, match=r"do not share a secret"):
            introduce(connecting(raw[0]), SECRET, A, Deadline(5.0), side=False)
        raw[0].close()
    between.join()
    assert "a relay between the two" in host.reasons[0]
    assert host.peer is None


# -- proofs ------------------------------------------------------------------------------------------


def meet(ours: bytes, theirs: bytes) -> None:
    a, b = Connecting(SECRET, A, b"a" * 32, ours), Accepting(SECRET, B, b"b" * 32, theirs)
    a.receive(b.receive(a.receive(b.receive(a.start()))))
    assert a.peer == B
    assert b.peer == A


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_proofs_hold_for_one_channel(ours: bytes, theirs: bytes) -> None:
    if ours == theirs:
        meet(ours, theirs)
    else:
        with pytest.raises(AuthenticationError, match=r"do not share a secret"):
            meet(ours, theirs)


# -- certificates ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls_ends.Authority:
    return tls_ends.Authority(tmp_path_factory.mktemp("tls"), "ours")


def identity_from(files: dict[str, str]) -> Identity:
    made = identity_of(Tls(**files))
    assert made is not None
    return made


def test_two_of_one_authority_take_each_other(
    authority: tls_ends.Authority, raw: tuple[socket.socket, socket.socket]
) -> None:
    ours = connecting(raw[0], identity_from(authority.sign("a")))
    with hosting(raw[1], identity_from(authority.sign("b"))) as host:
        peer, _, _, _ = introduce(ours, SECRET, A, Deadline(5.0), side=False)
    assert peer == B
    assert host.peer == A


@pytest.mark.parametrize("who", ["accepting", "connecting", "has none"])
def test_one_of_another_authority_is_refused_and_both_say_why(
    authority: tls_ends.Authority, tmp_path: Any, who: str
) -> None:
    good = identity_from(authority.sign("c"))
    other = tls_ends.Authority(tmp_path, "theirs").sign("d")
    # It accepts our certificate; we do not accept its.
    lax = identity_from({"certificate": other["certificate"], "key": other["key"]})
    lax.connecting.load_cert_chain(other["certificate"], other["key"])
    match who:
        case "accepting":
            ours, theirs = good, lax
        case "connecting":
            ours, theirs = lax, good
        case _:
            ours, theirs = tls_ends.an_identity(), good
    for _ in range(5):  # the refused side notices late, in several ways
        a, b = socket.socketpair()
        with a, hosting(b, theirs) as host:
            with pytest.raises(AuthenticationError) as caught:
                introduce(connecting(a, ours), SECRET, A, Deadline(5.0), side=False)
        texts = [str(caught.value), host.reasons[0]]
        refused = "the other end's certificate is rejected"
        refusing = "the other end rejects this worker's certificate"
        assert host.peer is None
        if who == "accepting":
            assert refused in texts[0]
            assert refusing in texts[1]
        else:
            assert refusing in texts[0]
            assert refused in texts[1] or "did not return a certificate" in texts[1]
        assert all("one authority" in each or "certificate" in each for each in texts)


@pytest.mark.parametrize("who", ["accepting", "connecting"])
def test_one_that_has_expired_meanwhile_is_to_be_renewed_and_both_say_so(
    authority: tls_ends.Authority, who: str
) -> None:
    good, old = identity_from(authority.sign("g")), authority.sign("h", until=2001)
    lax = identity_from({name: old[name] for name in ("certificate", "key")})
    lax.connecting.load_cert_chain(old["certificate"], old["key"])
    ours, theirs = (good, lax) if who == "accepting" else (lax, good)
    a, b = socket.socketpair()
    with a, hosting(b, theirs) as host:
        with pytest.raises(AuthenticationError) as caught:
            introduce(connecting(a, ours), SECRET, A, Deadline(5.0), side=False)
    for said in (str(caught.value), host.reasons[0]):
        assert "certificate" in said and "expired): renew it (" in said


def problem(**files: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Tls(**files)
    return caught.value


def test_files_that_cannot_work_are_refused_where_they_are_named(
    authority: tls_ends.Authority, tmp_path: Any
) -> None:
    good, other = authority.sign("e"), authority.sign("f")
    missing = str(tmp_path / "missing.pem")
    for name in ("certificate", "key", "authority"):
        error = problem(**{**good, name: missing})
        assert (error.field, error.value) == (f"tls.{name}", missing)
        assert "No such file" in str(error)
    error = problem(**{**good, "key": other["key"]})
    assert (error.field, error.value) == ("tls.key", other["key"])
    assert "does not match the certificate" in str(error)
    text = tmp_path / "text"
    text.write_text("nothing")
    assert problem(**{**good, "certificate": str(text)}).field == "tls.certificate"
    assert problem(**{**good, "authority": str(text)}).field == "tls.authority"
    stranger = tls_ends.Authority(tmp_path, "another")
    error = problem(**{**good, "authority": stranger.path})
    assert error.field == "tls.certificate"
    assert stranger.path in str(error)
    assert "is rejected by the authority" in str(error)
    error = problem(**authority.sign("old", until=2001))
    assert "certificate has expired" in str(error) and "renew it" in str(error)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(
    authority: tls_ends.Authority, tmp_path: Any
) -> None:
    from cryptography.hazmat.primitives import serialization

    files = authority.sign("g")
    key = serialization.load_pem_private_key(Path(files["key"]).read_bytes(), None)
    hidden = tmp_path / "hidden.key"
    hidden.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    assert "is encrypted" in str(problem(**{**files, "key": str(hidden)}))


def test_the_option_says_what_it_takes_and_what_it_needs(
    authority: tls_ends.Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NativeRpcBackendOptions().tls is False
    assert NativeRpcBackendOptions(tls=None).tls is False
    assert NativeRpcBackendOptions(tls=True).tls is True
    files = Tls(**authority.sign("h"))
    assert NativeRpcBackendOptions(tls=files).tls is files
    for value in ("yes", 1, ("a", "b")):
        with pytest.raises(ConfigError, match=r"expected True, False or rpc.Tls"):
            NativeRpcBackendOptions(tls=value)  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install cryptography"):
        NativeRpcBackendOptions(tls=True)
    assert NativeRpcBackendOptions(tls=files).tls is files
    with pytest.raises(ConfigError, match=r"torch's own agent has no encryption"):
        TensorPipe(None, "a", 0, 1, NativeRpcBackendOptions(tls=files))


def test_a_key_that_was_made_here_is_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    load = ssl.SSLContext.load_cert_chain

    def watched(context: ssl.SSLContext, certfile: Any, *others: Any) -> None:
        read.append(os.readlink(certfile))
        load(context, certfile, *others)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    assert identity_of(True) is not None
    assert len(read) == 1
    assert read[0].startswith("/memfd:")
