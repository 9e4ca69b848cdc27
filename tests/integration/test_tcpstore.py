"""Connections to c10d's store that fall silent: every call ends, and says so."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pace import pace
from ports import free_port
from rallypoint._core import clock
from rallypoint.errors import RendezvousConnectionError
from rallypoint.rendezvous.backends import tcpstore
from rallypoint.rendezvous.backends.tcpstore import TcpStore
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec
from rallypoint.rendezvous.store import StoreSilent


pytestmark = pytest.mark.alone


SERVER = """
import socket, sys
from rallypoint.rendezvous.backends.native_store import StoreServer
server = StoreServer(socket.create_server(("127.0.0.1", 0)))
print(server.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    yield process, port
    process.kill()
    process.communicate()


def test_a_server_that_stands_still_ends_every_call_once(server) -> None:
    process, port = server
    records = RecordStore(TcpStore("127.0.0.1", port, silence=1.0), Codec("job", None))
    assert records.increment("n") == 1
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until then a thread of it may still answer
    before = time.monotonic()
    with pytest.raises(StoreSilent):
        records.increment("n")  # and does not try again over another connection
    assert 0.8 < time.monotonic() - before < 3.0 * pace()
    os.kill(process.pid, signal.SIGCONT)
    again = TcpStore("127.0.0.1", port, silence=1.0)
    assert again.get("x" if again.exists("x") else records.full("n"), 1.0)


def test_closing_ends_a_call_of_another_thread(server) -> None:
    _, port = server
    store = TcpStore("127.0.0.1", port, silence=30.0)
    threading.Timer(0.3, store.close).start()
    before = time.monotonic()
    with pytest.raises(StoreSilent):
        store.get("never", 60.0)
    assert time.monotonic() - before < 5.0 * pace()
    with pytest.raises(StoreSilent, match="closed"):
        store.clone()
    with pytest.raises(StoreSilent, match="closed"):
        store.exists("never")


# A process of its own: in that of the tests, torch may hold something that does not survive a fork by another thread.
_FORKING = """
import contextlib, os, socket, threading
from rallypoint.errors import RendezvousConnectionError
from rallypoint.rendezvous.backends.tcpstore import TcpStore

begun, go_on = threading.Event(), threading.Event()

class Slow(socket.socket):
    def connect(self, address):
        begun.set()
        go_on.wait(60)
        raise ConnectionRefusedError

socket.socket = Slow

def come():
    with contextlib.suppress(RendezvousConnectionError):
        TcpStore("127.0.0.1", 1)

coming = threading.Thread(target=come)
coming.start()
assert begun.wait(30)
forking = threading.Thread(target=lambda: os.waitpid(os.fork() or os._exit(0), 0))
forking.start()
forking.join(30)
print("held up" if forking.is_alive() else "went on")
go_on.set()
coming.join()
forking.join()
"""


def test_a_fork_does_not_wait_for_a_connection_that_takes_its_time() -> None:
    program = [sys.executable, "-c", _FORKING]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == "went on\n"


def test_who_accepts_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpstore, "GREETING", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        before = time.monotonic()
        with pytest.raises(RendezvousConnectionError):
            TcpStore("127.0.0.1", mute.getsockname()[1], silence=1.0, timeout=1.0)
        assert time.monotonic() - before < 10.0 * pace()


def test_who_was_stopped_itself_grants_the_other_side_as_much(server) -> None:
    """What counts is how many turns an answer may take, not how much time."""
    turns = tcpstore._Turns(1.0)
    for _ in range(3):
        turns.another()
    with pytest.raises(TimeoutError):
        turns.another()
    _, port = server
    silence = 0.5 * pace()
    asking = os.fork()
    if asking == 0:
        store = TcpStore("127.0.0.1", port, silence=silence)
        while store.add("n", 1) < 100_000:
            pass
        os._exit(0 if store.exists("n") else 1)
    with contextlib.closing(TcpStore("127.0.0.1", port)) as watching:
        watching.get("n", 30.0)
        for _ in range(3):
            os.kill(asking, signal.SIGSTOP)
            os.waitpid(asking, os.WUNTRACED)
            time.sleep(2 * silence)  # twice what an answer may take
            os.kill(asking, signal.SIGCONT)
        watching.add("n", 100_000)
    assert os.waitpid(asking, 0)[1] == 0


@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGALRM])
def test_a_call_that_a_signal_has_interrupted_leaves_no_answer_for_the_next(
    server, interrupt: signal.Signals
) -> None:
    _, port = server
    store = TcpStore("127.0.0.1", port, silence=30.0)

    def raise_it(*_: object) -> None:
        raise InterruptedError("by a signal")

    before = signal.signal(interrupt, raise_it)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), interrupt))
    try:
        timer.start()
        with pytest.raises((InterruptedError, RendezvousConnectionError)):
            store.get("never", 30.0)
    finally:
        timer.join()
        signal.signal(interrupt, before)
    with pytest.raises(RendezvousConnectionError):
        store.set("k", b"v")  # its connection is out of step
    again = store.clone()
    again.set("k", b"v")
    assert again.get("k", 1.0) == b"v"
    again.close()
    store.close()


_TORCH_FIRST = """
import torch.distributed  # has read its log level by now
from concurrent.futures import ThreadPoolExecutor
from rallypoint.rendezvous import RendezvousParameters, rendezvous_handler_registry

endpoint = "127.0.0.1:%d"
handlers = [
    rendezvous_handler_registry.create_handler(
        RendezvousParameters("tcp", endpoint, "job", 2, 2, "127.0.0.1", is_host=node == 0)
    )
    for node in range(2)
]
with ThreadPoolExecutor(2) as pool:
    rounds = list(pool.map(lambda each: each.next_rendezvous(), handlers))
assert sorted(each.rank for each in rounds) == [0, 1]
rounds[0].store.set("key", b"value")
assert rounds[1].store.get("key") == b"value"
"""


def test_a_program_that_imported_torch_first_sees_no_warning_of_c10d() -> None:
    program = [sys.executable, "-c", _TORCH_FIRST % free_port()]
    env = {name: text for name, text in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, env=env)
    assert (done.returncode, done.stderr) == (0, "")


_WATCHED = """
import os, socket
from rallypoint.rendezvous.backends.native_store import StoreServer, client
from rallypoint.rendezvous.backends.tcpstore import TcpStore

server = StoreServer(socket.create_server(("127.0.0.1", 0)))
ours = TcpStore("127.0.0.1", server.port, silence=8.0)
connections = [client(ours, 1.0) for _ in range(2)]
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            if sock.getpeername()[1] == server.port:  # not the server's end
                print(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    except OSError:
        pass
"""


def test_the_kernel_watches_connections_of_c10ds_own_clients_too() -> None:
    program = [sys.executable, "-c", _WATCHED]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=240)
    # 0.6 of the silence for our own client, 0.9 for others, in ms. c10d alone sets none, as for its server's own client.
    assert sorted(done.stdout.split()) == ["0", "4800", *2 * ["7200"]]


def test_a_connection_tells_when_its_host_was_heard_last() -> None:
    signs = tcpstore.LifeSigns()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sock:
            sock.sendall(b"x")
            time.sleep(0.5)
            signs.note(sock)
            first = signs.at
            assert first is not None
            assert clock.MONOTONIC.now() - first > 0.4
            sock.sendall(b"x")
            time.sleep(0.1)
            signs.note(sock)
            assert signs.at is not None
            assert signs.at > first + 0.3, "the newest sign of any connection counts"
            before = signs.at
        signs.note(sock)
        assert signs.at == before, "a closed socket tells nothing"
