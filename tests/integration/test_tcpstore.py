"""Connections to c10d's store that fall silent: every call ends, and says so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rallypoint.errors import RendezvousConnectionError
from rallypoint.rendezvous.backends import tcpstore
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec
from rallypoint.rendezvous.store import StoreSilent


pytestmark = pytest.mark.alone


SERVER = """
import socket, sys
from rallypoint.rendezvous.backends.tcpstore import TcpStore
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
store = TcpStore("localhost", port, listener)
print(port, flush=True)
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
    records = RecordStore(tcpstore.connect("127.0.0.1", port, silence=1.0), Codec("job", None))
    assert records.increment("n") == 1
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until then a thread of it may still answer
    before = time.monotonic()
    with pytest.raises(StoreSilent):
        records.increment("n")  # and does not try again over another connection
    assert 0.8 < time.monotonic() - before < 3.0
    os.kill(process.pid, signal.SIGCONT)
    again = tcpstore.connect("127.0.0.1", port, silence=1.0)
    assert again.get("x" if again.exists("x") else records.full("n"), 1.0)


def test_closing_ends_a_call_of_another_thread(server) -> None:
    _, port = server
    store = tcpstore.connect("127.0.0.1", port, silence=30.0)
    threading.Timer(0.3, store.close).start()
    before = time.monotonic()
    with pytest.raises(StoreSilent):
        store.get("never", 60.0)
    assert time.monotonic() - before < 5.0
    with pytest.raises(StoreSilent, match="closed"):
        store.clone()
    with pytest.raises(StoreSilent, match="closed"):
        store.exists("never")


def test_who_accepts_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpstore, "GREETING", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        before = time.monotonic()
        with pytest.raises(RendezvousConnectionError):
            tcpstore.connect("127.0.0.1", mute.getsockname()[1], silence=1.0, timeout=1.0)
        assert time.monotonic() - before < 10.0


def test_a_watchdog_that_was_kept_from_running_grants_as_much() -> None:
    dog = tcpstore._Watchdog()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        dog.expect(lambda: ours.shutdown(socket.SHUT_RDWR), 0.6)
        time.sleep(0.1)
        with dog._changed:  # as if the process had stood still
            time.sleep(1.5)
        time.sleep(0.1)
        with pytest.raises(BlockingIOError):  # the connection is whole
            theirs.recv(1)
        theirs.settimeout(10.0)
        assert theirs.recv(1) == b"", "and is broken when no answer comes after that either"
