"""The handshake over real sockets: strangers of every kind, and none of them leaves a descriptor behind."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pace import pace
from rallypoint._core.clock import Deadline
from rallypoint.errors import AuthenticationError, DeadlineExceeded, ProtocolError
from rallypoint.rpc.connections.handshake import Introduced, Welcome, introduce
from rallypoint.wire.auth import Accepting, Connecting


SECRET = b"the job's own secret"
A = {"job": "x", "generation": 0, "name": "a", "id": 0}
B = {"job": "x", "generation": 0, "name": "b", "id": 1}


@pytest.fixture(autouse=True)
def _descriptors_are_returned() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


class Host:
    """The accepting side: a Welcome, and what became of it."""

    def __init__(self, sock: socket.socket, *, takes_side: bool = True, secret: bytes = SECRET):
        self.reasons: list[str] = []
        self.is_over = threading.Event()
        self.peer: dict[str, Any] | None = None
        self.rest = b""
        self.side: socket.socket | None = None
        self.sock: socket.socket | None = None
        self.welcome = Welcome(
            sock,
            secret,
            B,
            takes_side=takes_side,
            accepted=self._accepted,
            ended=lambda _, reason: self.reasons.append(reason),
        )

    def _accepted(
        self,
        sock: socket.socket,
        known: Introduced,
        _: deque[Any],
    ) -> None:
        assert self.reasons == [""]
        self.sock, (self.peer, self.rest, self.side, self.keys) = sock, known
        self.is_over.set()

    def serve(self, seconds: float = 5.0) -> None:
        """Serve as the poller would, until it is over."""
        until = time.monotonic() + seconds
        while not self.reasons and time.monotonic() < until:
            if select.select([self.welcome.sock], [], [], 0.05)[0]:
                self.welcome.on_ready(select.EPOLLIN, deque())

    def wait(self) -> None:
        assert self.is_over.wait(5.0)

    def close(self) -> None:
        if not self.reasons:
            self.welcome.close("the test is over")
        for sock in (self.sock, self.side):
            if sock is not None:
                sock.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@contextlib.contextmanager
def hosting(sock: socket.socket, **options: Any) -> Iterator[Host]:
    """A host that serves in the meantime."""
    host = Host(sock, **options)
    thread = threading.Thread(target=host.serve)
    thread.start()
    try:
        yield host
    finally:
        thread.join()
        host.close()


Pair = tuple[socket.socket, socket.socket]


# -- two that know each other ----------------------------------------------------------------------


@pytest.mark.parametrize("side", [False, True])
def test_both_learn_who_the_other_is(pair: Pair, side: bool) -> None:
    ours, theirs = pair
    with hosting(theirs, takes_side=side) as host:
        peer, rest, our_side, _ = introduce(ours, SECRET, A, Deadline(5.0), side=side)
        assert (peer, rest) == (B, b"")
        host.wait()
        assert host.peer == A
        assert (our_side is not None, host.side is not None) == (side, side)
        if our_side is not None and host.side is not None:
            our_side.send(b"beside")
            assert host.side.recv(10) == b"beside"
            our_side.close()
        assert host.sock is not None
        host.sock.send(b"after")
        ours.settimeout(5.0)
        assert ours.recv(10) == b"after"


def test_over_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, hosting(theirs, takes_side=False) as host:
        peer, _, side, _ = introduce(ours, SECRET, A, Deadline(5.0), side=False)
        assert (peer, side) == (B, None)
    assert host.peer == A


def test_what_comes_right_after_it_is_handed_on(pair: Pair) -> None:
    ours, theirs = pair
    host = Host(theirs)
    talk = Connecting(SECRET, A, b"n" * 32)
    ours.send(talk.start())
    host.welcome.on_ready(select.EPOLLIN, deque())
    ours.send(talk.receive(ours.recv(9000)) + b"the first request")
    host.welcome.on_ready(select.EPOLLIN, deque())
    assert (host.peer, host.rest) == (A, b"the first request")
    host.close()


def test_what_the_host_sends_right_after_it_is_handed_on(pair: Pair) -> None:
    ours, theirs = pair

    def answer() -> None:
        talk = Accepting(SECRET, B, b"m" * 32)
        theirs.sendall(talk.receive(theirs.recv(9000)))
        theirs.sendall(talk.receive(theirs.recv(9000)) + b"a first reply")

    thread = threading.Thread(target=answer)
    thread.start()
    _, rest, _, _ = introduce(ours, SECRET, A, Deadline(5.0), side=False)
    thread.join()
    assert rest == b"a first reply"


@pytest.mark.parametrize("delay", [0.0, 0.0005])
def test_bytes_that_come_one_by_one(pair: Pair, delay: float) -> None:
    ours, theirs = pair
    middle, hosts = socket.socketpair()

    def relay(source: socket.socket, to: socket.socket) -> None:
        while data := source.recv(1):
            to.send(data)
            time.sleep(delay)

    threads = [
        threading.Thread(target=relay, args=each, daemon=True)
        for each in ((theirs, middle), (middle, theirs))
    ]
    for each in threads:
        each.start()
    with hosting(hosts, takes_side=False) as host:
        peer, _, _, _ = introduce(ours, SECRET, A, Deadline(10.0), side=False)
        assert peer == B
    assert host.peer == A
    for sock in (ours, theirs, middle):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    for each in threads:
        each.join()
    middle.close()


# -- the connecting side is wrong ------------------------------------------------------------------


def test_another_secret_is_refused_and_both_say_so(pair: Pair) -> None:
    ours, theirs = pair
    with hosting(theirs) as host:
        with pytest.raises(AuthenticationError, match=r"refused .* do not share a secret"):
            introduce(ours, b"not the job's secret", A, Deadline(5.0), side=True)
    assert "do not share a secret" in host.reasons[0]
    assert host.peer is None
    assert theirs.fileno() == -1


def test_another_job_is_refused_and_both_say_so(pair: Pair) -> None:
    ours, theirs = pair
    with hosting(theirs) as host:
        with pytest.raises(AuthenticationError, match=r"belongs to job 'y'"):
            introduce(ours, SECRET, {**A, "job": "y"}, Deadline(5.0), side=True)
    assert "belongs to job 'y'" in host.reasons[0]


def test_who_leaves_at_once(pair: Pair) -> None:
    ours, theirs = pair
    ours.close()
    host = Host(theirs)
    host.serve()
    assert "closed the connection during the handshake" in host.reasons[0]


def test_who_leaves_in_the_middle(pair: Pair) -> None:
    ours, theirs = pair
    host = Host(theirs)
    ours.send(Connecting(SECRET, A, b"n" * 32).start())
    host.welcome.on_ready(select.EPOLLIN, deque())
    ours.close()
    host.serve()
    # The answer to its hello went nowhere: the connection was reset, or it ended.
    assert len(host.reasons) == 1
    assert host.reasons[0]
    assert host.peer is None


def test_who_says_nothing_is_not_waited_for_for_ever(pair: Pair) -> None:
    _, theirs = pair
    host = Host(theirs)
    assert 5.0 < host.welcome.until - time.monotonic() < 15.0
    host.welcome.on_ready(select.EPOLLIN, deque())
    assert host.reasons == []
    host.welcome.close("it has not proved itself in time")
    assert host.reasons == ["it has not proved itself in time"]
    assert theirs.fileno() == -1


@pytest.mark.parametrize("seed", range(30))
def test_garbage(pair: Pair, seed: int) -> None:
    chance = random.Random(seed)
    ours, theirs = pair
    host = Host(theirs)
    hello = bytearray(Connecting(SECRET, A, b"n" * 32).start())
    match seed % 3:
        case 0:
            data = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * chance.randrange(1, 500)
        case 1:
            data = chance.randbytes(chance.randrange(8, 30_000))
        case _:
            for _ in range(chance.randrange(1, 4)):
                hello[chance.randrange(len(hello))] ^= 1 << chance.randrange(8)
            data = bytes(hello)
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        ours.send(data)
    ours.shutdown(socket.SHUT_WR)
    host.serve()
    assert len(host.reasons) == 1
    assert host.reasons[0].isprintable()
    assert host.peer is None
    assert theirs.fileno() == -1


def test_a_flood_is_cut_off_and_not_kept(pair: Pair) -> None:
    ours, theirs = pair
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(b"RLY1" + (8000).to_bytes(4, "little") + bytes(8000))
    host = Host(theirs)
    host.welcome.on_ready(select.EPOLLIN, deque())
    assert len(host.reasons) == 1
    assert theirs.fileno() == -1


# -- descriptors -----------------------------------------------------------------------------------


def hello_with(ours: socket.socket, *fds: int) -> Connecting:
    talk = Connecting(SECRET, A, b"n" * 32)
    socket.send_fds(ours, [talk.start()], fds)
    return talk


@pytest.mark.parametrize("make", [os.pipe, lambda: (os.open("/dev/null", os.O_RDONLY),)])
def test_a_descriptor_that_is_no_socket(pair: Pair, make: Callable[[], tuple[int, ...]]) -> None:
    ours, theirs = pair
    fds = make()
    host = Host(theirs)
    hello_with(ours, fds[0])
    for fd in fds:
        os.close(fd)
    host.serve()
    assert host.reasons == ["received a descriptor that is not a socket"]


def test_a_descriptor_that_is_another_kind_of_socket(pair: Pair) -> None:
    ours, theirs = pair
    host = Host(theirs)
    with socket.socket() as other:
        hello_with(ours, other.fileno())
    host.serve()
    assert host.reasons == ["received a descriptor that is not a Unix socket"]


@pytest.mark.parametrize("count", [2, 3, 10, 200])
def test_more_descriptors_than_one(pair: Pair, count: int) -> None:
    ours, theirs = pair
    host = Host(theirs)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as other:
        hello_with(ours, *[other.fileno()] * count)
    host.welcome.on_ready(select.EPOLLIN, deque())
    host.close()


def test_a_descriptor_with_each_message(pair: Pair) -> None:
    ours, theirs = pair
    host = Host(theirs)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as other:
        talk = hello_with(ours, other.fileno())
        host.welcome.on_ready(select.EPOLLIN, deque())
        proof = talk.receive(ours.recv(9000))
        for at in range(len(proof)):
            socket.send_fds(ours, [proof[at : at + 1]], [other.fileno()])
    host.serve()
    assert host.peer == A
    assert host.side is not None
    host.close()


@pytest.mark.parametrize("end", ["leaves", "lies", "is late"])
def test_a_side_socket_of_one_that_does_not_prove_itself(pair: Pair, end: str) -> None:
    ours, theirs = pair
    host = Host(theirs)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hello_with(ours, there.fileno())
    there.close()
    host.welcome.on_ready(select.EPOLLIN, deque())
    match end:
        case "leaves":
            ours.close()
            host.serve()
        case "lies":
            ours.send(b"RLY1" + struct.pack("<I", 2) + b"{}")
            host.serve()
        case _:
            host.welcome.close("it has not proved itself in time")
    assert len(host.reasons) == 1
    assert here.recv(1) == b"", "the other end of the side socket is still open"
    here.close()


def test_a_descriptor_is_not_taken_from_who_has_no_use_for_one() -> None:
    # TCP carries none; a listener in this process wants none.
    ours, theirs = socket.socketpair()
    with hosting(theirs, takes_side=False) as host, ours:
        peer, _, side, _ = introduce(ours, SECRET, A, Deadline(5.0), side=True)
        assert peer == B
        assert side is not None
        assert side.recv(1) == b""
        side.close()
    assert host.side is None


def test_a_descriptor_that_came_is_not_inherited(pair: Pair) -> None:
    ours, theirs = pair
    with hosting(theirs) as host:
        _, _, side, _ = introduce(ours, SECRET, A, Deadline(5.0), side=True)
        assert side is not None
        assert not side.get_inheritable()
        side.close()
        host.wait()
        assert host.side is not None
        assert not host.side.get_inheritable()


# -- the accepting side is wrong -------------------------------------------------------------------


@pytest.mark.parametrize("side", [False, True])
def test_one_that_never_answers_is_given_up_in_time(pair: Pair, side: bool) -> None:
    ours, _ = pair
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"did not complete the handshake in time"):
        introduce(ours, SECRET, A, Deadline(0.2), side=side)
    assert 0.2 <= time.monotonic() - began < 2.0 * pace()


def test_one_that_answers_ever_so_slowly_is_given_up_in_time(pair: Pair) -> None:
    # Each byte is in time; all of them together are not.
    ours, theirs = pair
    talk = Accepting(SECRET, B, b"m" * 32)
    stopped = threading.Event()

    def drip() -> None:
        for byte in talk.receive(theirs.recv(9000)):
            if stopped.wait(0.05):
                return
            theirs.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        introduce(ours, SECRET, A, Deadline(0.4), side=True)
    assert time.monotonic() - began < 2.0 * pace()
    stopped.set()
    thread.join()


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError, r"it is another program"),
        (b"RLY1" + struct.pack("<I", 9000), ProtocolError, r"a message of 9000 bytes"),
        (b"RLY1" + struct.pack("<I", 2) + b"[]", ProtocolError, r"not a JSON object"),
        (b"", ProtocolError, r"closed the connection during"),
        (b"RLY1\x02", ProtocolError, r"closed the connection during"),
    ],
)
def test_one_that_is_something_else(
    pair: Pair, answer: bytes, error: type[Exception], message: str
) -> None:
    ours, theirs = pair
    theirs.sendall(answer)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(error, match=message):
        introduce(ours, SECRET, A, Deadline(5.0), side=True)


def test_one_that_sends_our_own_words_back(pair: Pair) -> None:
    ours, theirs = pair

    def echo() -> None:
        with contextlib.suppress(OSError):
            while data := theirs.recv(9000):
                theirs.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(ProtocolError, match=r"our own, sent back"):
        introduce(ours, SECRET, A, Deadline(5.0), side=True)
    ours.close()
    thread.join()


def test_one_that_does_not_know_the_secret_is_told_and_not_believed(pair: Pair) -> None:
    ours, theirs = pair
    heard: list[bytes] = []

    def pretend() -> None:
        # It takes whatever proof it gets; then its own is wrong.
        talk = Accepting(b"only a guess at it", B, b"m" * 32)
        theirs.sendall(talk.receive(theirs.recv(9000)))
        theirs.recv(9000)
        proof = b'{"proof":"' + b"0" * 64 + b'"}'
        theirs.sendall(b"RLY1" + struct.pack("<I", len(proof)) + proof)
        heard.append(theirs.recv(9000))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(AuthenticationError, match=r"do not share a secret"):
        introduce(ours, SECRET, A, Deadline(5.0), side=True)
    thread.join()
    assert b'"refused"' in heard[0]
    assert SECRET not in heard[0]


def test_one_that_is_gone(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        introduce(ours, SECRET, A, Deadline(5.0), side=True)


def test_no_time_at_all(pair: Pair) -> None:
    ours, _ = pair
    with pytest.raises(DeadlineExceeded):
        introduce(ours, SECRET, A, Deadline(0.0), side=True)
