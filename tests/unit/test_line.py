"""Lines over real sockets, plain and within TLS: full ones, broken ones, and many threads at once."""

from __future__ import annotations

import array
import gc
import itertools
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

import tls_ends
from pace import pace
from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, ProtocolError
from rallypoint.wire.frames import Frame, FrameParser, Limits, encode, header
from rallypoint.wire.line import PATIENCE, Closed, Line
from rallypoint.wire.tls import new_line


# More than any socket buffer holds.
LARGE = 8 << 20


class Ends:
    def __init__(self, kind: str) -> None:
        a, b = socket.socketpair() if kind == "plain" else tls_ends.pair()
        self.a, self.b = new_line(a, FrameParser(), kind), new_line(b, FrameParser(), kind)

    def receive(self, count: int, line: Line | None = None) -> list[Frame]:
        """That many frames, received at the other end."""
        found: list[Frame] = []
        until = time.monotonic() + 20.0
        while len(found) < count:
            found += (line or self.b).read(0.5)
            assert time.monotonic() < until, f"only {len(found)} of {count} frames came"
        return found

    def fill(self) -> None:
        """Send until the kernel takes no more."""
        while self.a.send(encode(99, 0, bytes(10_000))):
            pass


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    before = set(os.listdir("/proc/self/fd"))
    made = Ends(request.param)
    yield made
    for each in (made.a, made.b):
        each.shut()
        each.close()
    assert set(os.listdir("/proc/self/fd")) == before


def in_thread(act: object, *args: object) -> threading.Thread:
    thread = threading.Thread(target=act, args=args)  # type: ignore[arg-type]
    thread.start()
    return thread


# -- sending ---------------------------------------------------------------------------------------


def test_what_the_kernel_takes_is_sent_at_once(ends: Ends) -> None:
    pieces = encode(1, 2, b"payload", [memoryview(b"buffer")])
    assert ends.a.send(pieces)
    assert not ends.a.is_full
    (frame,) = ends.receive(1)
    assert (frame.call, frame.payload, list(map(bytes, frame.buffers))) == (
        2,
        b"payload",
        [b"buffer"],
    )
    assert ends.a.bytes_sent == ends.b.bytes_received == sum(map(len, pieces))


def test_a_full_socket_makes_nobody_wait_and_loses_nothing(ends: Ends) -> None:
    large = os.urandom(LARGE)
    calls: list[bool] = []
    ends.a.on_full = lambda: calls.append(ends.a.is_full)
    assert not ends.a.send(encode(1, 1, b"", [memoryview(large)]))
    assert not ends.a.send(encode(1, 2, b"two"))
    assert not ends.a.send(encode(1, 3, b"three", [memoryview(b"x"), memoryview(b"y")]))
    # Called once, when the line fills up, and not under the lock, so that it may ask the line.
    assert calls == [True]
    assert not ends.a.flush()
    found: list[Frame] = []
    while len(found) < 3:
        found += ends.b.read_now()
        done = ends.a.flush()
    assert done
    assert [frame.call for frame in found] == [1, 2, 3]
    assert found[0].buffers[0] == large
    assert ends.a.bytes_sent == ends.b.bytes_received
    assert ends.a.send(encode(1, 4, b"")), "an empty line sends at once again"


def test_a_frame_of_more_pieces_than_the_kernel_takes_at_once(ends: Ends) -> None:
    buffers = [bytes([number % 251]) * (1 + number % 7) for number in range(3000)]
    ends.a.send(encode(1, 1, b"p", [memoryview(each) for each in buffers]))
    ends.a.push(Deadline(10.0))
    (frame,) = ends.receive(1)
    assert list(map(bytes, frame.buffers)) == buffers


@pytest.mark.parametrize("is_full", [False, True])
def test_pieces_of_no_bytes_and_of_larger_items(ends: Ends, is_full: bool) -> None:
    # An empty piece at the end of a full line must not be retried forever; items are counted in bytes.
    if is_full:
        ends.fill()
    numbers = memoryview(array.array("q", range(100)))
    frame = encode(1, 5, b"p", [memoryview(b""), numbers, memoryview(b"")])
    ends.a.send(frame)
    sender = in_thread(ends.a.push, Deadline(10.0))
    found = ends.receive(1)
    while found[-1].call != 5:
        found += ends.receive(1)
    sender.join()
    assert [bytes(each) for each in found[-1].buffers] == [b"", numbers.tobytes(), b""]
    assert not ends.a.is_full


def test_what_is_sent_is_held_until_it_is_sent_and_no_longer(ends: Ends) -> None:
    class Tensor:
        pass

    def references() -> list[weakref.ref[Tensor]]:
        held = [Tensor(), Tensor(), Tensor()]
        ends.a.send(encode(1, 1, b"small"), held[0])
        ends.a.send(encode(1, 2, b"", [memoryview(bytes(LARGE))]), held[1])
        ends.a.send(encode(1, 3, b"behind it"), held[2])
        return [weakref.ref(each) for each in held]

    small, large, behind = references()
    gc.collect()
    assert small() is None
    assert large() is not None
    assert behind() is not None
    sender = in_thread(ends.a.push, Deadline(10.0))
    ends.receive(3)
    sender.join()
    assert (large(), behind()) == (None, None)


def test_what_has_been_sent_is_let_go_while_more_is_to_be_sent(ends: Ends) -> None:
    """The peer is always a little behind, so the outbox is never empty."""

    class Tensor:
        pass

    alive: list[weakref.ref[Tensor]] = []
    most = 0
    for number in range(30):
        held = Tensor()
        alive.append(weakref.ref(held))
        ends.a.send(encode(1, number, b"", [memoryview(bytes(1 << 20))]), held)
        del held
        while ends.a.left > 2 << 20:
            ends.b.read_now()
            ends.a.flush()
        gc.collect()
        most = max(most, sum(each() is not None for each in alive))
        assert number < 3 or ends.a.left > 0
    assert most <= 4, most


def test_what_is_held_goes_when_the_line_is_closed(ends: Ends) -> None:
    class Tensor:
        pass

    tensor = Tensor()
    kept = weakref.ref(tensor)
    ends.a.send(encode(1, 2, b"", [memoryview(bytes(LARGE))]), tensor)
    del tensor
    ends.a.shut()
    assert kept() is not None
    ends.a.close()
    assert kept() is None


def test_frames_of_many_threads_do_not_mix_and_each_threads_keep_their_order(ends: Ends) -> None:
    senders, each_sends = 6, 60
    ready = threading.Barrier(senders)

    def send(sender: int) -> None:
        ready.wait()
        for number in range(each_sends):
            # Small ones, and some larger than the socket buffer, so that the line fills up again and again.
            size = 300_000 if number % 17 == sender else number
            data = bytes([sender]) * size
            ends.a.send(encode(sender, number, data, [memoryview(data)] if number % 3 else []))
            if number % 5 == 0:
                ends.a.push(Deadline(30.0))

    threads = [in_thread(send, sender) for sender in range(senders)]
    seen: dict[int, list[int]] = {sender: [] for sender in range(senders)}
    count = 0
    until = time.monotonic() + 60.0
    while count < senders * each_sends and time.monotonic() < until:
        ends.a.flush()
        for frame in ends.b.read(0.05):
            count += 1
            seen[frame.kind].append(frame.call)
            for data in (frame.payload, *frame.buffers):
                assert set(bytes(data)) <= {frame.kind}  # type: ignore[arg-type]
    for each in threads:
        each.join()
    assert seen == {sender: list(range(each_sends)) for sender in range(senders)}


def test_push_waits_until_the_other_end_reads(ends: Ends) -> None:
    ends.a.send(encode(1, 1, b"", [memoryview(bytes(LARGE))]))
    sender = in_thread(ends.a.push, Deadline(20.0))
    sender.join(0.1)
    assert sender.is_alive()
    ends.receive(1)
    sender.join(10.0)
    assert not sender.is_alive()
    assert not ends.a.is_full


def test_push_gives_up_in_time_and_the_rest_can_still_be_sent(ends: Ends) -> None:
    large = os.urandom(LARGE)
    ends.a.send(encode(1, 1, b"", [memoryview(large)]))
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"does not read"):
        ends.a.push(Deadline(0.1))
    assert 0.1 <= time.monotonic() - began < 2.0 * pace()
    sender = in_thread(ends.a.push, Deadline(None))
    (frame,) = ends.receive(1)
    sender.join()
    assert frame.buffers[0] == large


# -- receiving -------------------------------------------------------------------------------------


def test_reading_now_does_not_wait(ends: Ends) -> None:
    assert ends.b.read_now() == []
    ends.a.send([header(1, 1, 3), b"ab"])
    assert ends.b.read_now() == []
    ends.a.send([b"c", header(1, 2, 0)])
    assert [(f.call, f.payload) for f in ends.b.read_now()] == [(1, b"abc"), (2, b"")]


@pytest.mark.parametrize("left", [0.0, 0.001, 0.15, PATIENCE, 5.0])
def test_a_read_ends_in_time_when_nothing_comes(ends: Ends, left: float) -> None:
    began = time.monotonic()
    assert ends.b.read(left) == []
    took = time.monotonic() - began
    assert min(left, PATIENCE) - 0.01 <= took < min(left, PATIENCE) + pace()


def test_a_read_without_a_limit_returns_now_and_then(ends: Ends) -> None:
    began = time.monotonic()
    assert ends.b.read(None) == []
    assert PATIENCE - 0.01 <= time.monotonic() - began < PATIENCE + pace()


@pytest.mark.parametrize("left", [None, 0.5, 5.0])
def test_a_read_returns_as_soon_as_something_comes(ends: Ends, left: float | None) -> None:
    timer = threading.Timer(0.05, lambda: ends.a.send(encode(1, 1, b"x")))
    timer.start()
    began = time.monotonic()
    (frame,) = ends.b.read(left)
    assert frame.payload == b"x"
    assert time.monotonic() - began < 0.4 * pace()
    timer.join()


def test_what_came_with_the_handshake_comes_first(ends: Ends) -> None:
    data = b"".join(encode(1, 1, b"first") + encode(1, 2, b"second"))
    (first,) = ends.b.parse(data[:-3])
    assert ends.b.parse(b"") == []
    ends.a.send([data[-3:]])
    (second,) = ends.b.read(1.0)
    assert (first.payload, second.payload) == (b"first", b"second")


def test_damage_is_told_from_an_end() -> None:
    a, b = socket.socketpair()
    line = Line(b, FrameParser(Limits(payload=10)))
    a.send(header(1, 1, 11))
    with pytest.raises(ProtocolError, match=r"11 bytes"):
        line.read(1.0)
    a.close()
    line.close()


def test_reading_now_does_not_let_a_thread_run_that_computes() -> None:
    """It would keep the interpreter's lock for 5 ms per read: a call to a busy process took that much longer."""
    ends = Ends("plain")
    began, over, turns = threading.Lock(), False, 0
    began.acquire()

    def compute() -> None:
        nonlocal turns
        began.acquire()
        while not over and turns < 10_000_000:
            turns += 1

    busy = in_thread(compute)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # only a thread that releases the lock loses it
    try:
        began.release()
        for _ in range(1000):
            assert ends.b.read_now() == []
        seen = turns
    finally:
        over = True
        sys.setswitchinterval(before)
        busy.join()
        for each in (ends.a, ends.b):
            each.shut()
            each.close()
    assert seen == 0


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def alarms() -> Iterator[itertools.count[int]]:
    """A signal every few milliseconds, as profilers send them; its handler counts."""
    count = itertools.count()
    before = signal.signal(signal.SIGALRM, lambda *_: next(count))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    yield count
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signals_neither_break_a_read_nor_shorten_it(
    ends: Ends, alarms: itertools.count[int]
) -> None:
    began = time.monotonic()
    assert ends.b.read(0.1) == []
    assert 0.1 <= time.monotonic() - began < 0.6 * pace()
    for left in (0.5, 5.0, None):
        timer = threading.Timer(0.05, lambda: ends.a.send(encode(1, 1, b"x")))
        timer.start()
        assert len(ends.b.read(left)) == 1
        timer.join()
    assert next(alarms) > 10


def test_signals_neither_break_a_push_nor_prolong_it(
    ends: Ends, alarms: itertools.count[int]
) -> None:
    ends.a.send(encode(1, 1, b"", [memoryview(bytes(LARGE))]))
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        ends.a.push(Deadline(0.2))
    assert 0.2 <= time.monotonic() - began < 1.0 * pace()
    reader = in_thread(ends.receive, 1)
    ends.a.push(Deadline(20.0))
    reader.join()
    assert next(alarms) > 10


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["send", "send more", "flush", "push", "read", "read_now"])
def test_an_end_that_the_other_side_made_is_told_by_everything(ends: Ends, act: str) -> None:
    if act in ("send more", "flush", "push"):
        ends.fill()
    ends.b.shut()
    ends.b.close()
    time.sleep(0.01)
    with pytest.raises(Closed, match=r"the connection broke: .+|the other end has closed"):
        match act:
            case "send":
                ends.a.send(encode(1, 1, b"x"))
            case "send more":
                # Only queued behind the rest; the thread that sends the rest notices the end.
                assert not ends.a.send(encode(1, 1, b"x", [memoryview(b"y")]))
                ends.a.flush()
            case "flush":
                ends.a.flush()
            case "push":
                ends.a.push(Deadline(10.0))
            case "read":
                ends.a.read(1.0)
            case "read_now":
                ends.a.read_now()


def test_what_was_sent_before_the_end_is_received(ends: Ends) -> None:
    ends.a.send(encode(1, 1, b"last words"))
    ends.a.shut()
    ends.a.close()
    (frame,) = ends.b.read(1.0)
    assert frame.payload == b"last words"
    with pytest.raises(Closed, match=r"the other end has closed the connection"):
        ends.b.read(1.0)


@pytest.mark.parametrize("left", [None, 0.9, 30.0])
def test_an_end_of_our_own_wakes_who_reads(ends: Ends, left: float | None) -> None:
    said: list[str] = []

    def read() -> None:
        try:
            while True:
                ends.a.read(left)
        except Closed as error:
            said.append(str(error))

    reader = in_thread(read)
    time.sleep(0.05)
    began = time.monotonic()
    ends.a.shut()
    reader.join(5.0)
    assert time.monotonic() - began < 0.5 * pace()
    assert said


def test_an_end_of_our_own_wakes_who_pushes(ends: Ends) -> None:
    ends.fill()
    said: list[str] = []

    def push() -> None:
        try:
            ends.a.push(Deadline(None))
        except Closed as error:
            said.append(str(error))

    sender = in_thread(push)
    time.sleep(0.05)
    ends.a.shut()
    sender.join(5.0)
    assert said == ["this end has closed the connection"]


def test_a_lines_memory_goes_when_it_is_closed() -> None:
    # A quarter of a megabyte per connection is released at once, without waiting for a collection.
    a, b = socket.socketpair()
    line = Line(a, FrameParser())
    line.on_full = partial(print, line)
    kept = weakref.ref(line)
    gc.disable()
    try:
        line.close()
        del line
        assert kept() is None
    finally:
        gc.enable()
    b.close()


def test_a_push_that_the_end_overtakes_says_so(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    # Between two of our checks, another thread notices that the peer is gone and gives the socket back.
    ends.fill()
    flush = ends.a.flush

    def flush_and_lose() -> bool:
        done = flush()
        ends.a.shut()
        ends.a.close()
        return done

    monkeypatch.setattr(ends.a, "flush", flush_and_lose)
    with pytest.raises(Closed, match=r"this end has closed"):
        ends.a.push(Deadline(5.0))


def test_nothing_can_be_sent_or_read_after_our_own_end(ends: Ends) -> None:
    ends.a.shut()
    ends.a.shut()
    with pytest.raises(Closed, match=r"this end has closed"):
        ends.a.send(encode(1, 1, b"x"))
    ends.a.close()
    ends.a.close()
    with pytest.raises(Closed, match=r"this end has closed"):
        ends.a.send(encode(1, 1, b"x", [memoryview(b"y")]))
    for left in (0.1, 5.0):
        with pytest.raises(Closed, match=r"this end has closed"):
            ends.a.read(left)
    with pytest.raises(Closed, match=r"this end has closed"):
        ends.a.read_now()
    assert ends.a.fileno() == -1
    ends.a.shut()
