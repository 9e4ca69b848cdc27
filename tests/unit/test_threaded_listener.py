"""A server with one thread per connection: strangers take no more threads and descriptors than they may."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pace import pace
from rallypoint._core.threaded_listener import MOST_STRANGERS, ThreadedListener


def echo(sock: socket.socket, welcome: Callable[[], None]) -> None:
    """Members introduce themselves first."""
    with contextlib.suppress(OSError):
        if sock.recv(1) != b"m":
            return
        welcome()
        while data := sock.recv(100):
            sock.sendall(data)


@pytest.fixture
def listener() -> Iterator[ThreadedListener]:
    made = ThreadedListener(socket.create_server(("127.0.0.1", 0), backlog=512), echo, "tested")
    yield made
    made.close()
    made.drain(10.0)


def dial(listener: ThreadedListener, first: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", listener.port), timeout=10.0 * pace())
    sock.sendall(first)
    return sock


def is_answered(member: socket.socket) -> bool:
    member.sendall(b"?")
    return member.recv(1) == b"?"


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10.0 * pace()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def threads() -> int:
    return sum(each.name == "tested" for each in threading.enumerate())


def test_strangers_are_limited_and_members_are_not(listener: ThreadedListener) -> None:
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(dial(listener, b"m")) for _ in range(20)]
        assert all(map(is_answered, members))
        strangers = [stack.enter_context(dial(listener)) for _ in range(5 * MOST_STRANGERS)]
        late = stack.enter_context(dial(listener, b"m"))
        assert is_answered(late)
        until(lambda: threads() <= MOST_STRANGERS + 21)
        assert all(map(is_answered, [*members, late]))
        assert strangers[0].recv(1) == b"", "the oldest is closed"
    until(lambda: threads() == 0)


def test_connections_are_accepted_again_after_a_want_of_descriptors(
    listener: ThreadedListener,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # For one of them, the kernel may have taken a descriptor when the listener started to wait.
    members = [socket.socket() for _ in range(3)]
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held = [os.dup(0) for _ in range(highest)]  # no gap is left below
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
        for each in members:
            each.settimeout(10.0 * pace())
            each.connect(("127.0.0.1", listener.port))
            each.sendall(b"m")
        members[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            is_answered(members[-1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    members[-1].settimeout(10.0 * pace())
    assert members[-1].recv(1) == b"?"
    assert all(map(is_answered, members))
    for each in members:
        each.close()


def test_what_has_arrived_is_read_before_the_end(listener: ThreadedListener) -> None:
    with dial(listener, b"m") as member:
        assert is_answered(member)
        listener.drain(10.0 * pace())
        assert threads() == 0
        assert member.recv(1) == b""
    with dial(listener, b"m") as member:
        assert is_answered(member), "newcomers are served as before"


def test_connections_may_end_while_others_begin(listener: ThreadedListener) -> None:
    arrived = threading.Event()

    def arrive() -> None:
        for _ in range(300):
            with contextlib.suppress(OSError):
                dial(listener, b"m").close()
        arrived.set()

    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(arrive)
        while not arrived.is_set():
            listener.drain(10.0 * pace())
        arriving.result()
    until(lambda: threads() == 0)
