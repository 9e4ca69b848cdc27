"""Which nodes are lost, how soon that is noticed, and that no live node is declared dead."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pace import pace
from rallypoint.errors import RendezvousConnectionError
from rallypoint.rendezvous import liveness
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.liveness import BEATS, Loss, Neighbour, Pulse, WatchPost
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec


pytestmark = pytest.mark.alone


LEASE = 0.8 * pace()
BEAT = LEASE / BEATS
CODEC = Codec("job")
# Seconds that a busy machine may add.
SLACK = 0.5 * pace()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == before


class Watcher:
    """A pulse, what it has reported, and when."""

    def __init__(self, store: MemoryStore, name: str = "me", lease: float = LEASE) -> None:
        self.losses: queue.Queue[tuple[float, Loss]] = queue.Queue()
        self.store_lost: list[RendezvousConnectionError] = []
        self.pulse = Pulse(
            lambda: RecordStore(store, CODEC), name, lease, self._lost, self.store_lost.append
        )
        self.pulse.start()

    def _lost(self, loss: Loss) -> None:
        self.losses.put((time.monotonic(), loss))

    def loss(self, timeout: float) -> tuple[float, Loss]:
        return self.losses.get(timeout=timeout)

    def quiet_for(self, seconds: float) -> bool:
        try:
            self.losses.get(timeout=seconds)
        except queue.Empty:
            return True
        return False


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def watcher(store: MemoryStore) -> Iterator[Watcher]:
    made = Watcher(store)
    yield made
    made.pulse.stop(leaving=False, timeout=5)


@pytest.fixture
def beats(store: MemoryStore) -> Iterator[Callable[[str], threading.Event]]:
    """``beats(name)``: from now on that node beats, until the returned event is set."""
    started: list[tuple[threading.Thread, threading.Event]] = []
    records = RecordStore(store, CODEC)

    def start(name: str) -> threading.Event:
        stop = threading.Event()

        def beat() -> None:
            number = 0
            while not stop.wait(BEAT):
                number += 1
                records.write(f"beat/{name}", {"beat": number})

        records.write(f"beat/{name}", {"beat": 0})
        thread = threading.Thread(target=beat)
        started.append((thread, stop))
        thread.start()
        return stop

    yield start
    for thread, stop in started:
        stop.set()
        thread.join()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a watch post; the first line it prints is the port."""
    code = (
        "import sys\n"
        "from rallypoint.rendezvous.liveness import WatchPost\n"
        "post = WatchPost()\n"
        "print(post.port, flush=True)\n"
        "sys.stdin.read()\n"
    )
    popen = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield popen
    popen.kill()
    popen.wait()
    assert popen.stdin is not None and popen.stdout is not None
    popen.stdin.close()
    popen.stdout.close()


def port_of(child: subprocess.Popen[bytes]) -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def neighbour(name: str, port: int = 0, rank: int = 1) -> Neighbour:
    addr = ("127.0.0.1", port) if port else None
    return Neighbour(node_id=name, rank=rank, host=f"host-{name}", addr=addr)


# -- by the lease ---------------------------------------------------------------------------------


def test_a_beat_that_stands_still_is_a_loss_after_a_lease_and_not_before(watcher, beats) -> None:
    stop = beats("other")
    watcher.pulse.watch([neighbour("other")])
    assert watcher.quiet_for(1.5 * LEASE), "it beats"
    stop.set()
    still_since = time.monotonic()
    when, loss = watcher.loss(LEASE + SLACK + 2 * BEAT)
    assert LEASE - 2 * BEAT <= when - still_since <= LEASE + 2 * BEAT + SLACK
    assert (loss.certain, loss.left, loss.neighbour.node_id) == (False, False, "other")
    assert "host-other" in loss.reason
    assert watcher.quiet_for(2 * LEASE), "once"


def test_a_node_that_never_beat_has_a_lease_to_begin(watcher) -> None:
    before = time.monotonic()
    watcher.pulse.watch([neighbour("never")])
    when, loss = watcher.loss(LEASE + SLACK + 2 * BEAT)
    assert when - before >= LEASE - 2 * BEAT
    assert not loss.certain


def test_everybody_is_watched_by_the_beat(watcher, beats) -> None:
    stops = {name: beats(name) for name in ("a", "b", "c")}
    watcher.pulse.watch([neighbour("a")], [neighbour(name) for name in stops])
    assert watcher.quiet_for(LEASE)
    stops["b"].set()
    stops["c"].set()
    lost = {watcher.loss(2 * LEASE + SLACK)[1].neighbour.node_id for _ in range(2)}
    assert lost == {"b", "c"}


def test_when_the_neighbour_is_lost_the_next_one_is_watched(watcher, beats) -> None:
    stop_far = beats("far")
    watcher.pulse.watch([neighbour("near"), neighbour("far")])
    assert watcher.loss(LEASE + 2 * BEAT + SLACK)[1].neighbour.node_id == "near"
    assert watcher.quiet_for(LEASE)
    stop_far.set()
    assert watcher.loss(LEASE + 2 * BEAT + SLACK)[1].neighbour.node_id == "far"


def test_junk_for_a_beat_is_no_sign_of_life(store, watcher) -> None:
    store.set(CODEC.prefix + "beat/other", b"\xff")
    watcher.pulse.watch([neighbour("other")])
    assert not watcher.loss(LEASE + 2 * BEAT + SLACK)[1].certain


def test_a_new_round_forgets_who_was_lost_before(watcher) -> None:
    for _ in range(2):
        watcher.pulse.watch([neighbour("other")])
        assert watcher.loss(LEASE + 2 * BEAT + SLACK)


# -- by the line ----------------------------------------------------------------------------------


def test_a_killed_process_is_noticed_at_once_and_for_certain(watcher, beats, child) -> None:
    beats("other")  # its last beats may still be on their way
    watcher.pulse.watch([neighbour("other", port_of(child))])
    assert watcher.quiet_for(3 * BEAT)
    killed = time.monotonic()
    os.kill(child.pid, signal.SIGKILL)
    when, loss = watcher.loss(LEASE)
    assert when - killed < 0.7 * LEASE, "not by the lease"
    assert loss.certain and not loss.left


def test_a_stopped_process_is_lost_by_the_lease_only(watcher, beats, child) -> None:
    stop = beats("other")
    watcher.pulse.watch([neighbour("other", port_of(child))])
    assert watcher.quiet_for(3 * BEAT)
    os.kill(child.pid, signal.SIGSTOP)
    stop.set()
    still_since = time.monotonic()
    when, loss = watcher.loss(LEASE + 2 * BEAT + SLACK)
    assert when - still_since >= LEASE - 2 * BEAT
    assert not loss.certain


def test_who_leaves_says_so(store, watcher) -> None:
    other = Watcher(store, "other")
    watcher.pulse.watch([neighbour("other")])
    assert watcher.quiet_for(3 * BEAT)
    other.pulse.stop(leaving=True, timeout=5)
    _, loss = watcher.loss(3 * BEAT + SLACK)
    assert loss.left and loss.certain


def test_who_has_left_and_then_ends_was_not_killed(store, watcher, child) -> None:
    """The end of the process may be noticed before its last beat is read."""
    other = Watcher(store, "other", lease=100.0)
    port = port_of(child)
    watcher.pulse.watch([neighbour("other", port)])
    assert watcher.quiet_for(3 * BEAT)
    other.pulse.stop(leaving=True, timeout=5)
    os.kill(child.pid, signal.SIGKILL)
    _, loss = watcher.loss(3 * BEAT + SLACK)
    assert loss.left


def test_a_refused_connection_is_no_proof_while_its_beat_moves(watcher, beats) -> None:
    """Here, the address may be another host's."""
    stop = beats("other")
    watcher.pulse.watch([neighbour("other", closed_port())])
    assert watcher.quiet_for(2 * LEASE)
    stop.set()
    before = time.monotonic()
    when, loss = watcher.loss(LEASE + SLACK)
    assert loss.certain
    assert when - before < LEASE, "sooner than by the lease"


def test_a_connection_that_breaks_is_no_proof_while_the_next_one_holds(watcher, beats) -> None:
    """Firewalls forget connections, for example."""
    beats("other")
    with socket.create_server(("127.0.0.1", 0)) as post:
        post.settimeout(5)
        watcher.pulse.watch([neighbour("other", post.getsockname()[1])])
        for _ in range(3):
            post.accept()[0].close()
        assert watcher.quiet_for(LEASE)
    assert watcher.loss(2)[1].certain, "now nobody listens"


def test_an_address_that_is_none_leaves_it_to_the_beat(watcher, beats) -> None:
    beats("other")
    there = Neighbour(node_id="other", rank=1, host="h", addr=("nowhere.invalid", 1))
    watcher.pulse.watch([there])
    assert watcher.quiet_for(LEASE)
    watcher.pulse.stop(leaving=False, timeout=5)
    wait_for_lookups()


def test_a_name_server_that_does_not_answer_keeps_no_node_silent(
    monkeypatch, store, watcher, beats, child
) -> None:
    real, answers, asked = socket.getaddrinfo, threading.Event(), threading.Event()

    def slow(host: bytes, port: int, **more: Any) -> Any:
        if host == b"there":
            if more.get("flags") == socket.AI_NUMERICHOST:
                raise socket.gaierror
            asked.set()
            answers.wait(60)
            host = b"127.0.0.1"
        return real(host, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    beats("other")
    there = Neighbour(node_id="other", rank=1, host="h", addr=("there", port_of(child)))
    watcher.pulse.watch([there])
    assert asked.wait(5)
    records = RecordStore(store, CODEC)
    before = records.look(["beat/me"])[0] or {"beat": 0}
    assert watcher.quiet_for(2 * LEASE)
    after = records.look(["beat/me"])[0] or {"beat": 0}
    assert after["beat"] - before["beat"] >= BEATS  # twice as many if none were late
    answers.set()
    wait_for_lookups()
    time.sleep(2 * BEAT)
    child.kill()
    assert watcher.loss(SLACK + LEASE)[1].certain, "the line was opened"


def wait_for_lookups() -> None:
    for each in threading.enumerate():
        if each.name == "rally-lookup":
            each.join(60)


def test_a_post_stays_open_however_often_it_was_called(beats) -> None:
    """A line that its watcher has given up must not take up room: the kernel's queue is short."""
    post = WatchPost()
    try:
        for _ in range(5000):
            socket.create_connection(("127.0.0.1", post.port), timeout=1).close()
        with socket.create_connection(("127.0.0.1", post.port), timeout=1) as line:
            line.sendall(b"nobody should say anything")
            line.settimeout(5)
            assert line.recv(1) == b""
    except ConnectionResetError:
        pass  # hung up on, which is as good
    finally:
        post.close()
    post.close()


def test_strangers_at_a_post_cost_it_no_more_than_its_room(monkeypatch) -> None:
    """And a watcher from elsewhere stays connected, however many strangers there are."""
    monkeypatch.setattr("rallypoint.rendezvous.held_lines.room", lambda *_: 40)
    before = len(os.listdir("/proc/self/fd"))
    post = WatchPost()
    try:
        with contextlib.ExitStack() as strangers:
            for _ in range(200):
                line = socket.create_connection(("127.0.0.1", post.port), timeout=5)
                strangers.enter_context(line)
            # The newest is held, the oldest is closed.
            line.settimeout(0.2)
            with pytest.raises(TimeoutError):
                line.recv(1)
            ours = len(os.listdir("/proc/self/fd")) - before - 200
            assert ours <= 40 + 10
    finally:
        post.close()


def test_a_watcher_that_is_cut_off_again_and_again_loses_nobody(watcher, beats) -> None:
    beats("other")
    with socket.create_server(("127.0.0.1", 0)) as post:
        post.settimeout(5)
        watcher.pulse.watch([neighbour("other", post.getsockname()[1])])
        stop = threading.Event()
        came = 0

        def cut() -> None:
            nonlocal came
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    post.accept()[0].close()
                    came += 1

        thread = threading.Thread(target=cut)
        thread.start()
        post.settimeout(0.05)
        assert watcher.quiet_for(2 * LEASE)
        stop.set()
        thread.join()
        # Once per beat, not as fast as possible.
        assert 2 <= came <= 2 * 2 * BEATS + 4
    assert watcher.loss(5)[1].certain, "now nobody listens"


def test_a_post_that_is_closed_ends_the_lines_to_it() -> None:
    post = WatchPost()
    with socket.create_connection(("127.0.0.1", post.port), timeout=1) as line:
        line.settimeout(0.2)
        with pytest.raises(TimeoutError):
            line.recv(1)
        line.settimeout(5)
        post.close()
        try:
            assert line.recv(1) == b""
        except ConnectionResetError:
            pass  # it was still in the queue


# -- the store ------------------------------------------------------------------------------------


class Breakable(MemoryStore):
    error: Exception | None = None

    def set(self, key: str, value: bytes) -> None:
        if self.error is not None:
            raise self.error
        super().set(key, value)


@pytest.mark.parametrize("error", [RendezvousConnectionError("gone"), TimeoutError("no answer")])
def test_a_lost_store_is_told_once_and_ends_the_pulse(error: Exception) -> None:
    store = Breakable()
    watcher = Watcher(store)
    watcher.pulse.watch([neighbour("other")])
    store.error = error
    end = time.monotonic() + 5
    while not watcher.store_lost and time.monotonic() < end:
        time.sleep(0.01)
    watcher.pulse.watch([neighbour("another")])  # the thread is gone, and this does no harm
    watcher.pulse.stop(leaving=True, timeout=5)
    assert len(watcher.store_lost) == 1


def test_a_store_that_cannot_be_reached_at_all_is_told() -> None:
    def refuse() -> RecordStore:
        raise RendezvousConnectionError("nobody there")

    told: list[RendezvousConnectionError] = []
    pulse = Pulse(refuse, "me", LEASE, lambda _: None, told.append)
    pulse.start()
    pulse.stop(leaving=False, timeout=5)
    assert len(told) <= 1  # a pulse that is stopped at once need not report


def test_stopping_is_quick_and_says_nothing(store) -> None:
    watcher = Watcher(store, lease=1000.0)
    before = time.monotonic()
    watcher.pulse.stop(leaving=True, timeout=5)
    watcher.pulse.stop(leaving=True, timeout=5)
    assert time.monotonic() - before < pace()
    assert not watcher.store_lost
    (body,) = RecordStore(store, CODEC).look(["beat/me"])
    assert body is not None and body["left"] is True


# -- several at once ------------------------------------------------------------------------------


def certain_losses(watcher: Watcher, names: set[str]) -> None:
    """Wait until each of these is known to have ended."""
    left = set(names)
    while left:
        _, loss = watcher.loss(20)
        if loss.certain:
            left.remove(loss.neighbour.node_id)


def test_all_that_were_killed_together_are_known_to_have_ended(watcher, beats) -> None:
    """Each is known by its refused port, though all of them fall silent at the same time."""
    dead = [neighbour(name, closed_port(), rank) for rank, name in enumerate("abcd", 1)]
    watcher.pulse.watch(dead, dead)
    certain_losses(watcher, set("abcd"))
    assert watcher.quiet_for(2 * LEASE)


def test_a_node_that_is_silent_and_then_ends_is_told_as_both(watcher, beats, child) -> None:
    beats("b")
    watcher.pulse.watch([neighbour("a", port_of(child)), neighbour("b", rank=2)])
    _, loss = watcher.loss(20)
    assert (loss.neighbour.node_id, loss.certain) == ("a", False)
    child.kill()
    child.wait()
    certain_losses(watcher, {"a"})


def test_while_proof_is_wanted_silence_is_no_loss(watcher, child) -> None:
    quiet, dead = neighbour("quiet", port_of(child)), neighbour("dead", closed_port(), 2)
    watcher.pulse.prove([quiet, neighbour("unseen", rank=3), dead])
    certain_losses(watcher, {"dead"})
    assert watcher.quiet_for(2 * LEASE)
    child.kill()
    child.wait()
    certain_losses(watcher, {"quiet"})


def test_a_connection_that_was_cut_before_anybody_looked_proves_the_end_as_well() -> None:
    """A process is killed while a watcher connects to it: its port disappears a moment after the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = liveness._Line(Neighbour(node_id="a", rank=0, host="here", addr=("127.0.0.1", port)))
        connection, _ = listener.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()  # with a reset
    try:
        deadline = time.monotonic() + 10
        while not line.ended:
            assert time.monotonic() < deadline
            poller = select.poll()
            assert line.register(poller) >= 0
            poller.poll(1000)
            line.hear()
    finally:
        line.close()
